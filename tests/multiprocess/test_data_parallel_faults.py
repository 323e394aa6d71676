"""A rank of a user's own loop that is killed, stopped or leaves: the others say which, and end."""

import json
import random
import sys
from pathlib import Path

import pytest

from processes import Started

PROGRAM = Path(__file__).parent / "programs" / "faults.py"
DEADLINE_S = 3.0  # that the programs give
MARGIN_S = 7.0  # of a machine that others use, too
SHARED_MEMORY = Path("/dev/shm")

chance = random.Random(20)


def scenario(exchange: str, name: str, phase: str, victim: int = 1, **more) -> dict:
    first = {"construction": -1, "first backward": 0}.get(phase)
    step = chance.randint(1, 9) if first is None else first
    phase = phase.removeprefix("first ")
    return {
        "exchange": exchange,
        "signal": name,
        "phase": phase,
        "victim": victim,
        "step": step,
    } | more


PHASES = ("construction", "first backward", "forward", "backward", "optimizer")
LOST = {
    f"{name} in {phase}": scenario("host", name, phase)
    for name in ("SIGKILL", "SIGSTOP")
    for phase in PHASES
}
LOST |= {
    "SIGKILL of rank 0": scenario("host", "SIGKILL", "backward", victim=0),
    "SIGSTOP of rank 0": scenario("host", "SIGSTOP", "optimizer", victim=0),
    "SIGKILL of one of three": scenario("host", "SIGKILL", "backward", size=3),
    "SIGSTOP of one of three": scenario("host", "SIGSTOP", "backward", size=3),
    "SIGKILL at any time": scenario("host", "SIGKILL", "outside", step=chance.random()),
    "SIGSTOP at any time": scenario("host", "SIGSTOP", "outside", step=chance.random()),
    "leaving": scenario("host", "exit", "optimizer"),
}
LOST |= {
    f"on a simulated GPU: {name} in {phase}": scenario("host", name, phase, on_gpu=True)
    for name, phase in (
        ("SIGKILL", "first backward"),
        ("SIGKILL", "backward"),
        ("SIGSTOP", "backward"),
        ("SIGKILL", "optimizer"),
    )
}
OF_TORCH = {
    f"{exchange}: SIGKILL of rank {victim} in {phase}": scenario(
        exchange, "SIGKILL", phase, victim=victim
    )
    for exchange in ("tree", "allreduce")
    for victim, phase in ((1, "first backward"), (1, "backward"), (0, "optimizer"))
}
OTHER = {
    "paused": scenario("host", "SIGSTOP", "backward", steps=15, resumed_s=1.0),
    "interrupted": scenario("host", "SIGSTOP", "backward", interrupted_s=0.5),
}
SCENARIOS = LOST | OF_TORCH | OTHER


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, dict]:
    """What came of each scenario."""
    command = [sys.executable, str(PROGRAM), json.dumps(list(SCENARIOS.values()))]
    started = Started(command, tmp_path_factory.mktemp("faults"))
    try:
        done = started.finish(200)
        assert done.code == 0, done.err
        assert not started.members()
    finally:
        started.kill()
    assert not [path for path in SHARED_MEMORY.iterdir() if "paceline" in path.name]
    names = list(SCENARIOS)
    return {names[number]: one for number, one in map(json.loads, done.out.splitlines())}


def survivors(found: dict[str, dict], name: str) -> list[dict]:
    """What the ranks that were not struck have said, once they have all ended."""
    one, victim = found[name], SCENARIOS[name]["victim"]
    assert one["struck"], one
    assert set(one["left"]) <= {victim}
    assert not any(Path(f"/proc/{pid}").exists() for pid in one["pids"])
    others = [rank for rank in range(len(one["pids"])) if rank != victim]
    return [one["outcomes"][str(rank)] for rank in others]


@pytest.mark.parametrize("name", LOST)
def test_the_others_name_the_rank_that_is_lost(found, name: str):
    victim = SCENARIOS[name]["victim"]
    lost = f"worker {victim} (process {found[name]['pids'][victim]})"
    for outcome in survivors(found, name):
        assert outcome["error"].startswith("WorkerLost: "), outcome
        assert lost in outcome["error"]
        assert "\n" not in outcome["error"]
        assert outcome["after_s"] < DEADLINE_S + MARGIN_S


@pytest.mark.parametrize("name", OF_TORCH)
def test_the_others_stop_with_an_error(found, name: str):
    for outcome in survivors(found, name):
        assert "error" in outcome
        assert outcome["after_s"] < DEADLINE_S + MARGIN_S


def test_a_rank_that_pauses_for_less_than_the_deadline_is_waited_for(found):
    paused = found["paused"]
    assert paused["left"] == []
    assert paused["outcomes"]["0"]["bits"] == paused["outcomes"]["1"]["bits"]


def test_a_rank_that_waits_can_be_interrupted(found):
    (outcome,) = survivors(found, "interrupted")
    assert outcome["error"].startswith("KeyboardInterrupt")
    assert outcome["after_s"] < DEADLINE_S
