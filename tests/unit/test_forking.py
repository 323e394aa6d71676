"""Processes that are forked from the one that starts them: what they have of it, and what not."""

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pytest
import torch

import forked
from paceline import native
from paceline.links import forking
from paceline.links.forking import forked_from_here
from paceline.links.processes import Process, end, module_command, output, start
from processes import DEADLINE_S, is_running

Forked = Callable[..., CompletedProcess[str]]


@pytest.fixture
def fork(monkeypatch: pytest.MonkeyPatch) -> Iterator[Forked]:
    """Run a function in a process that is forked from here; return its end and what it said."""

    def begin(function: Callable[..., None], *arguments: str) -> CompletedProcess[str]:
        monkeypatch.setattr(forked, "run", function)
        return output(module_command("forked", *arguments), DEADLINE_S)

    with forked_from_here():
        yield begin


def began(monkeypatch: pytest.MonkeyPatch, function: Callable[[], None]) -> Process:
    monkeypatch.setattr(forked, "run", function)
    return start(module_command("forked"))


def opened(fd: int) -> Path:
    return Path(f"/proc/self/fd/{fd}").readlink()


def test_it_has_the_objects_of_the_one_that_forks_it_and_arguments_of_its_own(fork: Forked) -> None:
    word = object()
    done = fork(lambda *given: print(repr(word), given, sys.argv), "an", "argument")
    assert done.stdout == f"{word!r} ('an', 'argument') ['forked', 'an', 'argument']\n"
    assert done.returncode == 0, done.stderr


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
sys.path.insert(0, sys.argv[1])
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


def test_it_computes_in_parallel_after_the_one_that_forks_it_has() -> None:
    """OpenMP's threads do not exist in a fork: one of the thread that has used them hangs."""
    command = [sys.executable, "-c", COMPUTING, str(Path(forked.__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.stdout == "True True 2\n", done.stderr


def test_its_first_thread_is_its_main_one_which_alone_may_handle_signals(fork: Forked) -> None:
    def run() -> None:
        signal.signal(signal.SIGTERM, lambda *_: print("told"))
        os.kill(os.getpid(), signal.SIGTERM)
        print(threading.current_thread() is threading.main_thread(), threading.active_count())

    assert fork(run).stdout == "told\nTrue 1\n"


@pytest.fixture
def slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork comes late to its first action, as on a busy machine."""

    def die_with_parent(parent: int) -> None:
        time.sleep(0.3)
        native.die_with_parent(parent)

    monkeypatch.setattr(forking, "die_with_parent", die_with_parent)


@pytest.mark.usefixtures("slowly")
def test_handlers_of_signals_are_not_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with forked_from_here():
            process = began(monkeypatch, lambda: time.sleep(600))
            process.send(signal.SIGTERM)
            assert process.wait(DEADLINE_S)
            assert process.poll() == 128 + signal.SIGTERM  # not the handler of the program
            end([process])
    finally:
        signal.signal(signal.SIGTERM, before)


def test_sockets_and_pipes_stay_with_the_one_that_forks(fork: Forked) -> None:
    ours, theirs = socket.socketpair()
    out, into = os.pipe()

    def run() -> None:
        for fd in (ours.fileno(), theirs.fileno(), out, into):
            print(opened(fd))
        with suppress(OSError):
            ours.send(b"from the fork")
        os.close(into)  # whatever is closed or written there, nobody sees it
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


def test_files_that_are_read_have_places_of_their_own(fork: Forked, tmp_path: Path) -> None:
    """Two processes that move one place would read each other's samples."""
    path = tmp_path / "file"
    path.write_text("0123456789")
    with path.open("rb", buffering=0) as file:
        file.seek(2)
        assert fork(lambda: print(file.read(3))).stdout == "b'234'\n"
        assert file.tell() == 2
        path.unlink()
        assert fork(lambda: print(file.read(3))).stdout == "b'234'\n"


def test_what_is_passed_has_the_same_number(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(forked, "run", lambda: theirs.send(b"here"))
    with forked_from_here():
        process = start(module_command("forked"), pass_fds=[theirs.fileno()])
        end([process], wait_s=DEADLINE_S)
    assert process.poll() == 0
    assert ours.recv(10) == b"here"
    ours.close()
    theirs.close()


def test_environment_folder_and_cores_are_those_of_who_asks(
    fork: Forked, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ONE", "1")
    monkeypatch.chdir(tmp_path)
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(own)})
    try:
        done = fork(lambda: print(os.environ["ONE"], Path.cwd(), os.sched_getaffinity(0)))
    finally:
        os.sched_setaffinity(0, own)
    assert done.stdout == f"1 {tmp_path} { {min(own)} }\n"


def ends(how: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        how()

    return run


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        (lambda: sys.exit(3), 3, ""),
        (lambda: sys.exit("why"), 1, "why\n"),
        (lambda: sys.exit(), 0, ""),
        (lambda: {}["key"], 1, "KeyError: 'key'\n"),
        (os.abort, -signal.SIGABRT, ""),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), -signal.SIGKILL, ""),
    ],
)
def test_it_ends_as_any_other_process(fork: Forked, how, code: int, said: str) -> None:
    done = fork(ends(how))
    assert done.returncode == code
    assert done.stderr.endswith(said)


def test_what_this_program_has_not_yet_written_is_written_once(
    fork: Forked, tmp_path: Path
) -> None:
    with (tmp_path / "log").open("w") as file:
        file.write("line\n")
        fork(lambda: print("said"))
    assert (tmp_path / "log").read_text() == "line\n"


def test_each_draws_other_random_numbers(fork: Forked) -> None:
    first, second = (
        fork(lambda: print(random.random(), np.random.random())).stdout.split() for _ in range(2)
    )
    assert not set(first) & set(second)


def test_a_large_tensor_is_shared_and_not_copied(fork: Forked) -> None:
    nbytes = 256 * 2**20
    values = torch.ones(nbytes // 4)

    def run() -> None:
        assert float(values.sum()) == len(values)
        rollup = Path("/proc/self/smaps_rollup").read_text().splitlines()
        fields = [line.split() for line in rollup[1:]]
        held = {name: int(kib) * 1024 for name, kib, *_ in fields if name.startswith("Private")}
        print(sum(held.values()))

    assert int(fork(run).stdout) < nbytes / 2


@pytest.mark.usefixtures("slowly")
def test_none_outlives_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    with forked_from_here():
        process = began(monkeypatch, lambda: time.sleep(600))
        assert process.poll() is None
    assert process.wait(DEADLINE_S)
    assert process.poll() == -signal.SIGKILL
    process.close()
    assert not [one for one in threading.enumerate() if one.name.startswith("paceline")]


PARENT = """
import sys, time
sys.path.insert(0, sys.argv[1])
import forked
from paceline.links.forking import forked_from_here
from paceline.links.processes import module_command, start
forked.run = lambda: time.sleep(600)
with forked_from_here():
    print(start(module_command("forked")).pid, flush=True)
    time.sleep(600)
"""


def test_none_outlives_a_program_that_is_killed() -> None:
    command = [sys.executable, "-c", PARENT, str(Path(forked.__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert is_running(child)
        parent.kill()
    until = time.monotonic() + DEADLINE_S
    while is_running(child):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_any_thread_may_ask_for_a_process_which_lives_on_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel would end a process together with the thread that forked it."""
    started: list[Process] = []
    with forked_from_here():
        thread = threading.Thread(
            target=lambda: started.append(began(monkeypatch, lambda: time.sleep(600)))
        )
        thread.start()
        thread.join()
        assert not started[0].wait(0.3)
        end(started)


GPUS = """
import os
os.environ["PACELINE_SIMULATED_GPUS"] = "1"
import torch
from paceline.core.errors import InvalidInput
from paceline.devices import gpus
from paceline.links.forking import forked_from_here

gpus()
with forked_from_here():
    print("may fork")
torch.ones(1, requires_grad=True).sum().backward()
try:
    with forked_from_here():
        print("may fork")
except InvalidInput as error:
    print(error)
"""


def test_where_there_are_gpus_a_program_that_has_computed_gradients_is_told_what_to_do() -> None:
    command = [sys.executable, "-c", GPUS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    before, after = done.stdout.splitlines()
    assert before == "may fork"
    assert after.startswith("model: a recipe's workers are forked from this program, which has")
    assert after.endswith("package.module:factory, or run this program under torchrun")


def test_more_processes_than_there_can_be_are_an_error_here(monkeypatch, fork: Forked) -> None:
    def refuse() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refuse)
    with pytest.raises(BlockingIOError):
        fork(print)
