"""Programs of the kind that people train: the same with paceline.DataParallel as with torch's own.

Each runs on two ranks with DistributedDataParallel and with every exchange, and is compared step by
step: losses, gradients, parameters, buffers, random streams, and how often the module ran. The
programs are in programs/peers, and their names say what they do.
"""

import json
import runpy
import sys
from pathlib import Path

import pytest

from processes import Started

PEERS = Path(__file__).parent / "programs" / "peers"
PAIRS = runpy.run_path(str(PEERS / "pairs.py"))
DEADLINE_S = PAIRS["ALL_S"] + 60
EXCHANGES = ("allreduce", "host", "host_chunk_1", "tree")
# In few steps "auto" does nothing but "allreduce"; these take many, or change what is exchanged.
OF_AUTO = ("compiled", "groups", "loops", "modes", "optimizers", "switching", "unused")
THEMES = (
    *("accumulation", "checkpoints", "compiled", "graphs", "groups", "inputs_outputs", "loops"),
    *("modes", "modules", "norms", "optimizers", "outside_the_module", "precision", "recomputed"),
    *("streams", "switching", "unused"),
)
NAMES = PAIRS["names_in"]([PEERS / f"{theme}.py" for theme in THEMES])
FAULTS = {
    "trains_well": "",
    "hangs_on_one_rank": "hangs_on_one_rank",
    "dies_on_one_rank": "SIGABRT",
    "differs_in_the_second_step": "step 1: module 0: gradients: 0.bias: ",
    "draws_a_number_too_many": "streams: torch: ",
    "runs_forward_once_too_often": "module 0: runs: 2, not 1",
    "raises_where_ddp_does_not": "raised ValueError: of ours alone, not went on",
}

Outcomes = dict[tuple[str, str], list[str]]  # what went wrong, of each program and exchange


def outcomes_of(folder: Path, exchanges: str, programs: str) -> Outcomes:
    """Run programs on pairs of ranks, of which nothing is left in the end."""
    started = Started(
        [sys.executable, str(PEERS / "pairs.py"), str(folder), "ddp", exchanges, programs], folder
    )
    try:
        done = started.finish(DEADLINE_S)
        left = started.members()
    finally:
        started.kill()
    assert done.code == 0, done.err
    assert not left
    rows = map(json.loads, done.out.splitlines())
    return {(name, exchange): failures for name, exchange, failures, _ in rows}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> Outcomes:
    exchanges = ",".join([*EXCHANGES, f"auto:{'+'.join(OF_AUTO)}"])
    return outcomes_of(tmp_path_factory.mktemp("all"), exchanges, ",".join(THEMES))


@pytest.fixture(scope="module")
def faults(tmp_path_factory) -> Outcomes:
    return outcomes_of(tmp_path_factory.mktemp("faulty"), "host", "faulty")


@pytest.mark.parametrize(
    ("name", "exchange"),
    [
        (name, exchange)
        for name in NAMES
        for exchange in (*EXCHANGES, *(["auto"] if name.partition(".")[0] in OF_AUTO else []))
    ],
)
def test_a_program_is_the_same_as_with_ddp(outcomes: Outcomes, name: str, exchange: str):
    failures = outcomes[name, exchange]
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_one_program_is_told_and_the_others_go_on(faults: Outcomes, name: str):
    told = "\n".join(faults[f"faulty.{name}", "host"])
    assert FAULTS[name] in told
    assert bool(told) == bool(FAULTS[name])
