"""However hosts end, nothing of them is left: no process, and so no namespace."""

import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread, get_ident

import pytest
from hosts import TIMED_OUT, TwoHosts

from processes import DEADLINE_S, Started, is_running

BED = Path(__file__).parent
PROGRAMS = Path(__file__).parent / "programs"


def within_deadline(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def left(place: Path) -> list[str]:
    """What still runs in the networks that ranks have left the names of, or names this folder."""
    networks = {file.read_text() for file in place.glob("*.network")}
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_text().replace("\0", " ")
            network = str((process / "ns" / "net").readlink())
        except OSError:
            continue
        if (network in networks or str(place) in command) and is_running(int(process.name)):
            found.append(f"{process.name}: {command}")
    return found


def waiting(place: Path) -> list[str]:
    return [sys.executable, str(PROGRAMS / "waiting.py"), str(place)]


def both_wait(place: Path) -> bool:
    return within_deadline(lambda: len(list(place.glob("*.network"))) == 2)


def test_at_the_deadline_ranks_end_and_what_they_wrote_is_kept(
    hosts: TwoHosts, tmp_path: Path
) -> None:
    stubborn = f"trap '' TERM; echo begun; sleep 1000; : {tmp_path}"
    finished = hosts.run(["sh", "-c", stubborn], 2, deadline_s=0.5)
    assert [(one.code, one.out) for one in finished] == [(TIMED_OUT, "begun\nbegun\n")] * 2
    assert left(tmp_path) == []


def test_what_a_rank_leaves_behind_ends_with_the_run(hosts: TwoHosts, tmp_path: Path) -> None:
    daemon = f"setsid sh -c 'sleep 1000; : {tmp_path}' & echo done"
    assert [one.out for one in hosts.run(["sh", "-c", daemon])] == ["done\n", "done\n"]
    assert left(tmp_path) == []


def test_nothing_is_left_after_an_exception_during_a_run(can_build: None, tmp_path: Path) -> None:
    class Interrupted(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupted

    def once_both_wait(thread: int) -> None:
        both_wait(tmp_path)
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
    forking = [sys.executable, str(PROGRAMS / "forking.py"), str(BED)]
    started = Started(forking, tmp_path)
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
    can_build: None, main: Callable[..., Started], tmp_path: Path, number: int, code: int
) -> None:
    started = main("--", *waiting(tmp_path))
    assert both_wait(tmp_path)
    assert left(tmp_path)
    started.process.send_signal(number)
    assert started.process.wait(DEADLINE_S) == code
    assert within_deadline(lambda: left(tmp_path) == []), left(tmp_path)
    assert main("--", "true").finish().code == 0
