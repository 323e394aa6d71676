"""Processes forked from this one: objects, descriptors, threads and signal handlers.

test_processes.py tests properties of all processes.
"""

import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from subprocess import CompletedProcess

import pytest

import forked
from paceline.links.forking import forked_from_here
from paceline.links.processes import Process, end, module_command, output, start
from processes import DEADLINE_S

Forked = Callable[..., CompletedProcess[str]]


@pytest.fixture
def fork(monkeypatch: pytest.MonkeyPatch) -> Forked:
    """Run a function in a fork; return its exit code and output."""

    def begin(function: Callable[..., None], *arguments: str) -> CompletedProcess[str]:
        monkeypatch.setattr(forked, "run", function)
        with forked_from_here():
            return output(module_command("forked", *arguments), DEADLINE_S)

    return begin


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Process]:
    """Start an idle process; requires the context `forked_from_here`."""
    monkeypatch.setattr(forked, "run", signal.pause)
    return lambda: start(module_command("forked"))


def opened(fd: int) -> Path:
    return Path(f"/proc/self/fd/{fd}").readlink()


def test_outside_of_the_context_nothing_is_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    with forked_from_here(), forked_from_here():
        pass
    monkeypatch.setattr(forked, "run", lambda: print("forked"))
    monkeypatch.setenv("PYTHONPATH", str(Path(forked.__file__).parent))
    done = output(module_command("forked"), DEADLINE_S)
    assert (done.returncode, done.stdout) == (0, "")


COMPUTING = """
import os, sys
os.environ.pop("OMP_NUM_THREADS", None)
import torch
import forked
from paceline.links.forking import forked_from_here
from paceline.links.processes import module_command, output

def computed():
    x = torch.ones(400, 400, requires_grad=True)
    (x @ x).sin().sum().backward()
    return torch.randn(300_000).sin().isfinite().all(), x.grad.isfinite().all()

torch.set_num_threads(2)
computed()

def run():
    torch.set_num_threads(2)
    print(*map(bool, computed()), torch.get_num_threads())

forked.run = run
with forked_from_here():
    print(output(module_command("forked"), 120).stdout, end="")
"""
GPUS = """
import os
os.environ["PACELINE_SIMULATED_GPUS"] = "1"
import torch
from simulated_gpu import instead
from paceline.core.errors import InvalidInput
from paceline.links.devices import gpus
from paceline.links.forking import forked_from_here

gpus()
with forked_from_here():
    print("may fork")
torch.ones(1, requires_grad=True).sum().backward()
try:
    with forked_from_here():
        print("may fork")
except InvalidInput as error:
    print(error.field, bool(error.hint))
"""


@pytest.mark.parametrize(
    ("program", "said"), [(COMPUTING, "True True 2\n"), (GPUS, "may fork\nmodel True\n")]
)
def test_a_program_that_has_computed_forks_working_processes_or_is_refused(program, said) -> None:
    """A fork lacks the threads of OpenMP and of autograd on GPUs, and would hang."""
    environment = os.environ | {"PYTHONPATH": str(Path(forked.__file__).parent)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env=environment,
    )
    assert done.stdout == said, done.stderr


def test_a_fork_runs_in_its_main_thread_which_handles_signals(fork: Forked) -> None:
    def run() -> None:
        signal.signal(signal.SIGTERM, lambda *_: print("told"))
        os.kill(os.getpid(), signal.SIGTERM)
        print(threading.current_thread() is threading.main_thread(), threading.active_count())

    assert fork(run).stdout == "told\nTrue 1\n"


def test_a_fork_has_no_handler_of_the_program_and_may_be_started_by_any_thread(
    begin: Callable[[], Process],
) -> None:
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    started = list[Process]()
    try:
        with forked_from_here():
            thread = threading.Thread(target=lambda: started.append(begin()))
            thread.start()
            thread.join()
            # The kernel sends a parent-death signal when the forking thread, not the process, ends.
            assert not started[0].wait(0.1)
            started[0].send(signal.SIGTERM)
            assert started[0].wait(DEADLINE_S)
            assert started[0].poll() == 128 + signal.SIGTERM
            end(started)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_sockets_and_pipes_stay_with_the_parent(fork: Forked) -> None:
    ours, theirs = socket.socketpair()
    out, into = os.pipe()

    def run() -> None:
        for fd in (ours.fileno(), theirs.fileno(), out, into):
            print(opened(fd))
        with suppress(OSError):
            ours.send(b"from the fork")
        os.close(into)  # closing or writing it affects no other process
        print(os.open("/dev/zero", os.O_RDONLY) == into)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        done = fork(lambda: (run(), print(opened(listener.fileno()))))
    assert done.stdout == "/dev/null\n" * 4 + "True\n/dev/null\n", done.stderr
    theirs.setblocking(False)
    with pytest.raises(BlockingIOError):
        theirs.recv(1)
    for one in (ours, theirs):
        one.close()
    os.close(out)
    os.close(into)


def test_files_opened_for_reading_have_their_own_positions(fork: Forked, tmp_path: Path) -> None:
    """Processes with a shared file position would skip each other's samples."""
    path = tmp_path / "file"
    path.write_text("0123456789")
    with path.open("rb", buffering=0) as file:
        file.seek(2)
        assert fork(lambda: print(file.read(3))).stdout == "b'234'\n"
        assert file.tell() == 2
        path.unlink()
        assert fork(lambda: print(file.read(3))).stdout == "b'234'\n"


def test_buffered_output_is_written_once(fork: Forked, tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as file:
        file.write("line\n")
        fork(lambda: print("said"))
    assert (tmp_path / "log").read_text() == "line\n"


def test_each_thread_has_the_objects_of_its_own_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two recipes may be trained at once, and one ends before the other."""
    entered, over = threading.Event(), threading.Event()

    def other() -> None:
        monkeypatch.setattr(forked, "run", lambda: print("of the other"))
        with forked_from_here():
            entered.set()
            over.wait(DEADLINE_S)

    monkeypatch.setattr(forked, "run", lambda: print("of this one"))
    with forked_from_here():
        thread = threading.Thread(target=other)
        thread.start()
        entered.wait(DEADLINE_S)
        said = output(module_command("forked"), DEADLINE_S).stdout
        over.set()
        thread.join()
        assert [said, output(module_command("forked"), DEADLINE_S).stdout] == ["of this one\n"] * 2


def test_no_fork_outlives_the_context(begin: Callable[[], Process]) -> None:
    before = threading.enumerate()
    with forked_from_here():
        process = begin()
        assert process.poll() is None
    assert process.wait(DEADLINE_S)
    assert process.poll() == -signal.SIGKILL
    process.close()
    assert set(threading.enumerate()) <= set(before)


def test_an_error_of_fork_is_raised_in_the_parent(monkeypatch, fork: Forked) -> None:
    def refuse() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refuse)
    with pytest.raises(BlockingIOError):
        fork(print)


def test_modules_that_forks_run_have_a_main_function():
    run = ("wheel.child", "wheel.worker", "hogbatch.worker")
    for module in ("paceline.runs.launching", *(f"paceline.strategies.{one}" for one in run)):
        assert callable(importlib.import_module(module).main)
