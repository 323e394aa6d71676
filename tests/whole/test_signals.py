"""SIGINT and SIGTERM, at any moment and to any process: the run ends in order, and says so once."""

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from faults import Pause, failpoints
from processes import Started, children_of, held_port

pytestmark = pytest.mark.slow  # the quick one is in test_resume.py

PROGRAMS = Path(__file__).parent / "programs"
LONG = ("--profile-s", "0.2", "--epochs", "1000", "--timeout", "60")
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
MODULES = ("runs.launching", "hogbatch.worker", "wheel.worker")
Start = Callable[..., Started]


def command(strategy: str) -> tuple[str, ...]:
    workers = "cpu:1,cpu:1" if strategy == "hogbatch" else "2"
    named = ("--strategy", strategy, "--workers", workers)
    return ("-m", "paceline", "train", "lenet5", *named, *LONG)


def wait_for_epoch(run: Started) -> Started:
    """Wait until a run, which would take minutes, has trained an epoch."""
    lines = iter(run.process.stderr.readline, "")
    assert any(line.startswith("epoch ") for line in lines)
    return run


def training(start: Start, strategy: str, *before: str) -> Started:
    return wait_for_epoch(start(*before, *command(strategy)))


def check_ended(run: Started, number: signal.Signals, *named: str) -> None:
    """Check that the run has ended by a signal, and has named this in its one line."""
    done = run.finish()
    assert done.code == CODES[number], done.err
    assert not re.search("Traceback|KeyboardInterrupt|Exception ignored", done.err)
    (line,) = (one for one in done.err.splitlines() if one.startswith("paceline: "))
    assert all(one in line for one in named), line
    assert not run.members()


def check_saved(folder: Path) -> None:
    (run,) = (folder / "runs").iterdir()
    assert list(run.glob("checkpoints/step-*/*.safetensors"))
    assert not (run / "result.json").exists()


@pytest.mark.parametrize("number", list(CODES))
@pytest.mark.parametrize("strategy", ["host", "local"])
def test_a_signal_to_the_whole_group_is_said_once(start: Start, tmp_path, strategy, number) -> None:
    """SIGTERM ended the fork server, with it the ranks before they had saved, and said nothing."""
    run = training(start, strategy)
    os.killpg(run.process.pid, number)
    check_ended(run, number, " after step ", "--resume runs/")
    check_saved(tmp_path)


@pytest.mark.parametrize(
    ("strategy", "number"),
    [
        ("allreduce", signal.SIGINT),
        ("subbatch", signal.SIGTERM),
        ("hogbatch", signal.SIGTERM),
        ("hogbatch", signal.SIGINT),
        ("local", signal.SIGINT),
    ],
)
def test_a_signal_to_one_rank_stops_all_and_names_it(start, tmp_path, strategy, number) -> None:
    """Rank 1 kept it to itself, and the run went on."""
    run = training(start, strategy)
    workers = [pid for pid, line in run.members().items() if any(one in line for one in MODULES)]
    os.kill(max(workers), number)
    check_ended(run, number, f"(process {max(workers)})")
    check_saved(tmp_path)


@pytest.mark.parametrize("number", list(CODES))
def test_a_signal_before_the_command_has_imported_anything_is_not_lost(start, tmp_path, number):
    """It was lost in an import, or printed a traceback."""
    pause = Pause(tmp_path / "pause")
    with failpoints(pause.at("command.importing")):
        # Started afresh: in a fork of the tests' server all is imported.
        run = start(*command("allreduce"), afresh=True)
    os.kill(pause.reached(), number)
    check_ended(run, number)


@pytest.mark.parametrize(
    ("strategy", "moment", "goes_on"),
    [
        ("allreduce", {"name": "rank.started", "worker": 1}, True),
        ("allreduce", {"name": "rank.met", "worker": 1}, False),
        ("wheel", {"name": "worker.profiling", "visit": 1}, False),
    ],
)
def test_a_signal_before_the_steps_ends_all_ranks(start, tmp_path, strategy, moment, goes_on):
    """The launcher passed it on to those of its ranks that there were, and started the others."""
    pause = Pause(tmp_path / "pause")
    with failpoints(pause.at(**moment)):
        run = start(*command(strategy))
    pause.reached()
    run.process.send_signal(signal.SIGINT)
    if goes_on:
        pause.go_on()
    check_ended(run, signal.SIGINT)


def test_a_signal_between_the_starts_of_two_ranks_ends_both(start: Start, tmp_path: Path) -> None:
    """The second rank was not known yet: it found the launcher's store gone, and said so.

    A thread of the store takes a signal that the main one has blocked.
    """
    launching, meeting = Pause(tmp_path / "launching"), Pause(tmp_path / "meeting")
    with failpoints(launching.at("launch.started", worker=1), meeting.at("rank.met", worker=1)):
        run = start(*command("allreduce"))
    launching.reached()
    meeting.reached()
    run.process.send_signal(signal.SIGINT)
    launching.go_on()
    check_ended(run, signal.SIGINT)


def pair_of(start: Start, program: str) -> list[Started]:
    """Start two ranks of which the first keeps the store."""
    with held_port() as port:
        return [start(str(PROGRAMS / program), str(rank), str(port)) for rank in range(2)]


def test_a_store_that_is_lost_with_its_rank_is_no_internal_error(start: Start) -> None:
    first, second = pair_of(start, "lost_peers.py")
    done = second.finish()
    assert (first.finish().code, done.code) == (0, 1), done.err
    (line,) = [line for line in done.err.splitlines() if line.startswith("paceline: ")]
    assert f"worker 0 (process {first.process.pid})" in line


def test_a_fork_of_a_rank_does_not_keep_its_connections(start: Start) -> None:
    """The fork had them, too: the other rank waited for one that was gone, for half an hour."""
    first, second = pair_of(start, "forking_loop.py")
    forked = int(first.process.stdout.readline())
    first.process.send_signal(signal.SIGTERM)
    try:
        assert second.finish().code == 1
    finally:
        os.kill(forked, signal.SIGKILL)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 1), (signal.SIGUSR1, 3)], ids=["passed on", "left"]
)
def test_a_rank_that_is_slower_to_get_the_signal_does_not_speak_of_lost_peers(start, number, code):
    """On a busy machine its peer had ended before it was told to: a second line said so."""
    run = start(str(PROGRAMS / "lost_peers.py"))
    assert run.process.stdout.readline() == "ready\n"
    run.process.send_signal(number)
    done = run.finish()
    assert done.code == code, done.err
    assert "worker 1" not in done.err


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
    # No moment is hoped for: the launcher, whose store the ranks ask, is stopped for a second.
    signal.sigtimedwait([], 1.0)
    run.process.send_signal(signal.SIGCONT)
    wait_for_epoch(run).process.send_signal(signal.SIGTERM)
    check_ended(run, signal.SIGTERM)


def test_torchrun_stops_a_rank_after_its_checkpoint(start: Start, tmp_path: Path) -> None:
    """SIGTERM killed the rank at once: what it had learnt since its last checkpoint was lost."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    run = training(start, "allreduce", *torchrun)
    victim = max(children_of(run.process.pid, "paceline"))
    os.kill(victim, signal.SIGTERM)
    done = run.finish()
    (line,) = [line for line in done.err.splitlines() if line.startswith("paceline: ")]
    assert f"(process {victim})" in line
    check_saved(tmp_path)
    assert not run.members()
