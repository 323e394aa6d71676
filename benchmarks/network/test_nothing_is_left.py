"""However hosts end, nothing of them is left: no process, and so no namespace."""

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread, get_ident
from typing import TextIO

import pytest
from hosts import TIMED_OUT, TwoHosts

from faults import told
from processes import DEADLINE_S, Started, has_ended, is_running

BED = Path(__file__).parent
PROGRAMS = BED / "programs"


@pytest.fixture
def networks(tmp_path: Path) -> Iterator[TextIO]:
    """Give the names of the networks of ranks that wait."""
    with told(tmp_path / "networks") as names:
        yield names


def left(place: Path, known: set[str] = frozenset()) -> list[int]:
    """Return the processes in these networks, and those whose commands name this folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_text()
            network = str((process / "ns" / "net").readlink())
        except OSError:
            continue
        if (network in known or str(place) in command) and is_running(int(process.name)):
            found.append(int(process.name))
    return found


def waiting(place: Path) -> list[str]:
    return [sys.executable, str(PROGRAMS / "waiting.py"), str(place)]


def of_both(networks: TextIO) -> set[str]:
    """Wait until a rank of each host has told the name of its network."""
    return {networks.readline().strip() for _ in range(2)}


@pytest.mark.parametrize(
    ("script", "deadline_s", "code", "out"),
    [
        ("trap '' TERM; echo begun; sleep 1000; : {}", 0.5, TIMED_OUT, "begun\n"),
        ("setsid sh -c 'sleep 1000; : {}' & echo done", DEADLINE_S, 0, "done\n"),
    ],
    ids=["at the deadline", "a daemon"],
)
def test_ranks_end_and_their_output_is_kept(
    hosts: TwoHosts, tmp_path: Path, script: str, deadline_s: float, code: int, out: str
) -> None:
    finished = hosts.run(["sh", "-c", script.format(tmp_path)], deadline_s=deadline_s)
    assert [(one.code, one.out) for one in finished] == [(code, out)] * 2
    assert left(tmp_path) == []


def test_nothing_is_left_after_an_exception_during_a_run(
    can_build: None, tmp_path: Path, networks: TextIO
) -> None:
    class Interrupted(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupted

    def once_both_wait(thread: int) -> None:
        of_both(networks)
        signal.pthread_kill(thread, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, interrupt)
    interrupting = Thread(target=once_both_wait, args=[get_ident()])
    try:
        interrupting.start()
        with pytest.raises(Interrupted), TwoHosts(None) as hosts:
            hosts.run(waiting(tmp_path), deadline_s=DEADLINE_S)
    finally:
        interrupting.join()
        signal.signal(signal.SIGUSR1, before)
    assert left(tmp_path) == []


def test_hosts_close_though_a_forked_process_holds_their_input(
    can_build: None, tmp_path: Path
) -> None:
    started = Started([sys.executable, str(PROGRAMS / "forking.py"), str(BED)], tmp_path)
    try:
        finished = started.finish()
    finally:
        started.kill()
    assert (finished.code, finished.out) == (0, "closed\n"), finished.err


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)],
)
def test_a_signal_ends_the_program_with_all_that_it_has_started(
    can_build: None, main: Callable[..., Started], tmp_path: Path, networks: TextIO, number, code
) -> None:
    started = main("--", *waiting(tmp_path))
    processes = left(tmp_path, of_both(networks))
    assert len(processes) > 2
    started.process.send_signal(number)
    assert started.process.wait(DEADLINE_S) == code
    assert all(map(has_ended, processes))
    assert main("--", "true").finish().code == 0
