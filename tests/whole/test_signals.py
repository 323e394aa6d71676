"""SIGINT and SIGTERM, at any moment and to any process: the run ends in order, and says so once."""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from processes import Started, children_of
from rpc_exchange import free_port

pytestmark = pytest.mark.slow

PROGRAMS = Path(__file__).parent / "programs"

LONG = ("--profile-s", "0.2", "--epochs", "1000", "--deadline-s", "60")
WORKERS = {
    "allreduce": "2",
    "host": "2",
    "subbatch": "2",
    "hogbatch": "cpu:1,cpu:1",
    "wheel": "2",
    "local": "2",
}
CODES = {signal.SIGINT: (130, "interrupted"), signal.SIGTERM: (143, "terminated")}
MODULES = ("runs.launching", "hogbatch.worker", "wheel.worker", "local.worker")

Start = Callable[..., Started]


def command(strategy: str) -> tuple[str, ...]:
    named = ("--strategy", strategy, "--workers", WORKERS[strategy])
    return ("-m", "paceline", "train", "lenet5", *named, *LONG)


def training(start: Start, strategy: str) -> Started:
    """Start a run that would take minutes, and return it once it trains."""
    run = start(*command(strategy))
    lines = iter(run.process.stderr.readline, "")
    assert any(line.startswith("epoch 1/") for line in lines)
    return run


def check_ended(run: Started, number: signal.Signals, also: str = "") -> str:
    """Check that the run has ended by a signal, and return the one line that says so."""
    done, (code, word) = run.finish(), CODES[number]
    assert done.code == code, done.err
    assert not re.search("Traceback|KeyboardInterrupt|Exception ignored", done.err)
    lines = [one for one in done.err.splitlines() if one.startswith("paceline: ")]
    assert len(lines) == 1, done.err
    (line,) = lines
    assert line.startswith(f"paceline: {word}{also}")
    assert not run.members()
    return line


@pytest.fixture
def checkpointed(tmp_path: Path) -> Iterator[None]:
    """Check afterwards that a checkpoint was written, and no result."""
    yield
    (run,) = (tmp_path / "runs").iterdir()
    assert list(run.glob("checkpoints/step-*/*.safetensors"))
    assert not (run / "result.json").exists()


@pytest.mark.usefixtures("checkpointed")
@pytest.mark.parametrize("number", list(CODES))
@pytest.mark.parametrize("strategy", ["host", "local"])
def test_a_signal_to_the_whole_group_is_said_once(start: Start, strategy, number) -> None:
    """SIGTERM ended the fork server, with it the ranks before they had saved, and said nothing."""
    run = training(start, strategy)
    os.killpg(run.process.pid, number)
    line = check_ended(run, number, " after step ")
    assert re.search(r"; paceline train --resume runs/\S+ goes on$", line)


@pytest.mark.usefixtures("checkpointed")
@pytest.mark.parametrize(
    ("strategy", "number"),
    [
        ("allreduce", signal.SIGINT),
        ("subbatch", signal.SIGTERM),
        ("hogbatch", signal.SIGTERM),
        ("local", signal.SIGINT),
    ],
)
def test_a_signal_to_one_rank_stops_all_and_names_it(start: Start, strategy, number) -> None:
    """Rank 1 kept it to itself, and the run went on."""
    run = training(start, strategy)
    workers = [pid for pid, line in run.members().items() if any(one in line for one in MODULES)]
    os.kill(max(workers), number)
    line = check_ended(run, number, " by a signal to worker ")
    assert f"(process {max(workers)}) after step " in line


@pytest.mark.parametrize("number", list(CODES))
def test_a_signal_before_the_command_has_imported_anything_is_not_lost(
    start: Start, number: signal.Signals
) -> None:
    """It was lost in an import, or printed a traceback."""
    # Started afresh: in a fork of the tests' server all is imported.
    run = start(*command("allreduce"), afresh=True)
    deadline = time.monotonic() + 600
    while not handles(run.process.pid, number):
        assert time.monotonic() < deadline
    os.kill(run.process.pid, number)
    check_ended(run, number)


def handles(pid: int, number: int) -> bool:
    """Whether a process has a handler of a signal that is not the default of Python."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = int(re.search(r"SigCgt:\s*(\w+)", status)[1], 16)
    # Python itself handles SIGINT, and before we do: SIGTERM tells.
    return bool(number and caught >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize("strategy", ["allreduce", "wheel"])
@pytest.mark.parametrize("when_s", [0.0, 0.4, 0.8])
def test_a_signal_before_the_steps_ends_all_ranks(start: Start, strategy, when_s: float) -> None:
    """The launcher passed it on to those of its ranks that there were, and started the others."""
    run = start(*command(strategy))
    deadline = time.monotonic() + 600
    while not any(one in line for line in run.members().values() for one in MODULES):
        assert run.process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(when_s)
    run.process.send_signal(signal.SIGINT)
    check_ended(run, signal.SIGINT)


def test_a_signal_between_the_starts_of_two_ranks_ends_both(start: Start) -> None:
    """The second rank was not known yet: it found the launcher's store gone, and said so.

    A thread of the store takes a signal that the main one has blocked.
    """
    run = start(str(PROGRAMS / "signalled_start.py"), *command("allreduce")[2:])
    check_ended(run, signal.SIGINT)


def test_a_store_that_is_lost_with_its_rank_is_no_internal_error(start: Start) -> None:
    program, port = str(PROGRAMS / "store_lost.py"), str(free_port())
    first, second = (start(program, str(rank), port) for rank in range(2))
    done = second.finish()
    assert (first.finish().code, done.code) == (0, 1), done.err
    said = [line for line in done.err.splitlines() if line.startswith("paceline: ")]
    gone = f"worker 0 (process {first.process.pid})"
    assert said == [f"paceline: worker 1 stops: {gone} died in the middle of the run"]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 1), (signal.SIGUSR1, 3)], ids=["passed on", "left"]
)
def test_a_rank_that_is_slower_to_get_the_signal_does_not_speak_of_lost_peers(
    start: Start, number: signal.Signals, code: int
) -> None:
    """On a busy machine its peer had ended before it was told to: a second line said so."""
    run = start(str(PROGRAMS / "left_alone.py"))
    assert run.process.stdout.readline() == "ready\n"
    run.process.send_signal(number)
    done = run.finish()
    assert done.code == code, done.err
    assert "worker 1 stops" not in done.err


@pytest.mark.parametrize("strategy", ["host", "wheel"])
def test_the_second_signal_does_not_wait(start: Start, strategy: str) -> None:
    run = training(start, strategy)
    run.process.send_signal(signal.SIGSTOP)
    # It finds both when it goes on: SIGINT twice would be one.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCONT):
        run.process.send_signal(number)
    done = run.finish()
    assert done.code in (130, 143)
    assert "Traceback" not in done.err
    assert not run.members()


@pytest.mark.parametrize("strategy", ["allreduce", "wheel"])
def test_a_launcher_that_was_stopped_goes_on(start: Start, strategy: str) -> None:
    run = training(start, strategy)
    run.process.send_signal(signal.SIGSTOP)
    time.sleep(3)
    run.process.send_signal(signal.SIGCONT)
    lines = iter(run.process.stderr.readline, "")
    assert any(line.startswith("epoch ") for line in lines)
    run.process.send_signal(signal.SIGTERM)
    check_ended(run, signal.SIGTERM)


def test_torchrun_stops_a_rank_after_its_checkpoint(start: Start, tmp_path: Path) -> None:
    """SIGTERM killed the rank at once: what it had learnt since its last checkpoint was lost."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    run = start(*torchrun, *command("allreduce"))
    lines = iter(run.process.stderr.readline, "")
    assert any(line.startswith("epoch 1/") for line in lines)
    victim = max(children_of(run.process.pid, "paceline"))
    os.kill(victim, signal.SIGTERM)
    done = run.finish()
    said = [line for line in done.err.splitlines() if line.startswith("paceline: ")]
    assert len(said) == 1, done.err
    assert re.match(rf"paceline: terminated by a signal to worker \d \(process {victim}\)", said[0])
    assert list((tmp_path / "runs").glob("*/checkpoints/step-*/*.safetensors"))
    assert not run.members()


def test_a_fork_of_a_rank_does_not_keep_its_connections(start: Start) -> None:
    """The fork had them, too: the other rank waited for one that was gone, for half an hour."""
    program, port = str(PROGRAMS / "forking_loop.py"), str(free_port())
    first, second = (start(program, str(rank), port) for rank in range(2))
    forked = int(first.process.stdout.readline().removeprefix("forked "))
    first.process.send_signal(signal.SIGTERM)
    try:
        done = second.finish()
        assert done.code == 1
        assert re.search("Connection (reset|closed) by peer", done.err)
    finally:
        os.kill(forked, signal.SIGKILL)
