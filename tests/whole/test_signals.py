"""SIGINT and SIGTERM to any process at any time end a run with one error line."""

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from faults import Pause, failpoints
from processes import Started, children_of, held_port

pytestmark = pytest.mark.slow  # test_resume.py has a quick test of SIGINT

LOST_PEERS = str(Path(__file__).parent / "programs" / "lost_peers.py")
LONG = ("--profile-s", "0.2", "--epochs", "1000", "--timeout", "60")
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
MODULES = ("runs.launching", "hogbatch.worker", "wheel.worker")
Start = Callable[..., Started]


def command(strategy: str) -> tuple[str, ...]:
    workers = "cpu:1,cpu:1" if strategy == "hogbatch" else "2"
    named = ("--strategy", strategy, "--workers", workers)
    return ("-m", "paceline", "train", "lenet5", *named, *LONG)


def wait_for_epoch(run: Started) -> Started:
    """Wait until a run has trained an epoch."""
    lines = iter(run.process.stderr.readline, "")
    assert any(line.startswith("epoch ") for line in lines)
    return run


def training(start: Start, strategy: str, *before: str) -> Started:
    return wait_for_epoch(start(*before, *command(strategy)))


def check_ended(run: Started, number: signal.Signals, *named: str) -> None:
    """Check the exit code of a signal, and that `named` is in the only error line."""
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
def test_a_signal_to_the_process_group_is_reported_once(start, tmp_path, strategy, number) -> None:
    """SIGTERM once ended the fork server, which killed the ranks before they saved."""
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
    """Once only the signalled rank knew of the signal, and the run continued."""
    run = training(start, strategy)
    workers = [pid for pid, line in run.members().items() if any(one in line for one in MODULES)]
    os.kill(max(workers), number)
    check_ended(run, number, f"(process {max(workers)})")
    check_saved(tmp_path)


IMPORTING = {"name": "command.importing"}


@pytest.mark.parametrize(
    ("strategy", "moment", "number", "continues"),
    [
        *(("allreduce", IMPORTING, number, False) for number in CODES),
        ("allreduce", {"name": "rank.started", "worker": 1}, signal.SIGINT, True),
        ("allreduce", {"name": "rank.met", "worker": 1}, signal.SIGINT, False),
        ("wheel", {"name": "worker.profiling", "visit": 1}, signal.SIGINT, False),
    ],
)
def test_a_signal_before_the_steps_ends_all_ranks(
    start, tmp_path, strategy, moment, number, continues
):
    """The signal was once lost in an import, or in ranks that the launcher started later."""
    pause = Pause(tmp_path / "pause")
    with failpoints(pause.at(**moment)):
        # A process of the tests' fork server would have imported everything already.
        run = start(*command(strategy), afresh=moment is IMPORTING)
    pause.reached()
    run.process.send_signal(number)
    if continues:
        pause.go_on()
    check_ended(run, number)


def test_a_signal_between_the_starts_of_two_ranks_ends_both(start: Start, tmp_path: Path) -> None:
    """The second rank was once not signalled, and reported that it lost the launcher's store.

    A thread of the store receives a signal that the main thread has blocked.
    """
    launching, meeting = Pause(tmp_path / "launching"), Pause(tmp_path / "meeting")
    with failpoints(launching.at("launch.started", worker=1), meeting.at("rank.met", worker=1)):
        run = start(*command("allreduce"))
    launching.reached()
    meeting.reached()
    run.process.send_signal(signal.SIGINT)
    launching.go_on()
    check_ended(run, signal.SIGINT)


def pair_of(start: Start, *more: str) -> list[Started]:
    """Start two ranks; rank 0 hosts the store."""
    with held_port() as port:
        return [start(LOST_PEERS, str(rank), str(port), *more) for rank in range(2)]


def test_a_rank_that_loses_the_store_names_the_lost_rank(start: Start) -> None:
    first, second = pair_of(start)
    done = second.finish()
    assert (first.finish().code, done.code) == (0, 1), done.err
    (line,) = [line for line in done.err.splitlines() if line.startswith("paceline: ")]
    assert f"worker 0 (process {first.process.pid})" in line


def test_a_fork_of_a_rank_does_not_keep_its_connections(start: Start) -> None:
    """With inherited connections, the other rank waited for the dead rank for half an hour."""
    first, second = pair_of(start, "forks")
    forked = int(first.process.stdout.readline())
    try:
        assert second.finish().code == 1
    finally:
        os.kill(forked, signal.SIGKILL)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 1), (signal.SIGUSR1, 3)], ids=["passed on", "left"]
)
def test_a_rank_that_is_signalled_late_does_not_report_a_lost_peer(start, number, code):
    """On a busy machine, a rank reported its ended peer before it received the signal itself."""
    run = start(LOST_PEERS)
    assert run.process.stdout.readline() == "ready\n"
    run.process.send_signal(number)
    done = run.finish()
    assert done.code == code, done.err
    assert "worker 1" not in done.err


@pytest.mark.parametrize("strategy", ["host", "wheel"])
def test_the_second_signal_does_not_wait(start: Start, strategy: str) -> None:
    run = training(start, strategy)
    run.process.send_signal(signal.SIGSTOP)
    # After SIGCONT both signals are pending; two SIGINTs would be merged into one.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCONT):
        run.process.send_signal(number)
    done = run.finish()
    assert done.code in (130, 143)
    assert "Traceback" not in done.err
    assert not run.members()


@pytest.mark.parametrize("strategy", ["allreduce", "wheel"])
def test_a_stopped_launcher_continues(start: Start, strategy: str) -> None:
    run = training(start, strategy)
    run.process.send_signal(signal.SIGSTOP)
    # Stop the launcher, which hosts the ranks' store, for a second.
    signal.sigtimedwait([], 1.0)
    run.process.send_signal(signal.SIGCONT)
    wait_for_epoch(run).process.send_signal(signal.SIGTERM)
    check_ended(run, signal.SIGTERM)


def test_torchrun_stops_a_rank_after_its_checkpoint(start: Start, tmp_path: Path) -> None:
    """SIGTERM once killed the rank at once, without a checkpoint."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    run = training(start, "allreduce", *torchrun)
    victim = max(children_of(run.process.pid, "paceline"))
    os.kill(victim, signal.SIGTERM)
    done = run.finish()
    (line,) = [line for line in done.err.splitlines() if line.startswith("paceline: ")]
    assert f"(process {victim})" in line
    check_saved(tmp_path)
    assert not run.members()
