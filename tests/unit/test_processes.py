"""Processes: new programs, forks of the fork server, and forks of this process."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

import forked
from paceline.links import forkserver
from paceline.links.forking import forked_from_here
from paceline.links.memory import KEEPING_MEMORY
from paceline.links.processes import (
    end,
    module_command,
    output,
    reason,
    start,
    wait,
)
from processes import DEADLINE_S, has_ended

FOREVER = "import signal; signal.pause()"
Command = Callable[..., list[str]]


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """A fork server that has imported numpy."""
    with forkserver.open_server(("numpy",), KEEPING_MEMORY | os.environ):
        yield os.environ.pop(forkserver.ADDRESS)


@pytest.fixture
def served(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(forkserver.ADDRESS, server)


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(forked.__file__).parent))


def running(code: str, *arguments: object) -> list[str]:
    return module_command("forked", code, *map(str, arguments))


@pytest.fixture(params=["started", "served", "forked"])
def command(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Command]:
    """Build a command that runs some code, for each way to start a process."""
    if request.param == "served":
        monkeypatch.setenv(forkserver.ADDRESS, request.getfixturevalue("server"))
    with forked_from_here() if request.param == "forked" else nullcontext():
        yield running


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


# Each of the three ways to start a process


@pytest.mark.parametrize(
    ("code", "expected", "said"),
    [
        ("import sys; print(sys.argv[1:])", 0, "['an', 'argument']\n"),
        ("raise SystemExit(3)", 3, ""),
        ("raise SystemExit", 0, ""),
        ("import sys; print('a'); sys.exit('why')", 1, "a\nwhy\n"),
        ("{}['key']", 1, "KeyError: 'key'\n"),
        ("import os; os.abort()", -signal.SIGABRT, ""),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
    ],
)
def test_a_process_ends_with_its_code(command: Command, code: str, expected: int, said: str):
    done = output(command(code, "an", "argument"), DEADLINE_S)
    assert done.returncode == expected
    assert (done.stdout + done.stderr).endswith(said)


def test_an_output_is_read_whole(command: Command) -> None:
    code = "import sys; print('x' * 10**6); print(sys.stdin.read(), file=sys.stderr)"
    done = output(command(code), DEADLINE_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "x" * 10**6 + "\n", "\n")


def test_waiting_for_an_output_ends_at_the_timeout(command: Command) -> None:
    before = num_descriptors()
    with pytest.raises(TimeoutError):
        output(command(FOREVER), 0.2)
    assert num_descriptors() <= before + 1  # the forking thread may still hold one


def test_a_process_that_runs_is_waited_for_no_longer_than_allowed(command: Command) -> None:
    process = start(command(FOREVER))
    assert not process.wait(0.05)
    assert process.poll() is None
    assert not has_ended(process.pid, 0.0)
    end([process])
    assert process.poll() in (-signal.SIGTERM, 128 + signal.SIGTERM)
    assert has_ended(process.pid, 0.0)
    end([process])  # a second call has no effect


def test_environment_folder_and_cores_are_those_of_the_caller(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ONE", "1")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    own = os.sched_getaffinity(0)
    values = "os.environ['ONE'], os.environ['TWO'], 'HOME' in os.environ"
    code = f"import os; print({values}, os.getcwd(), os.sched_getaffinity(0))"
    os.sched_setaffinity(0, {min(own)})
    with os.fdopen(os.memfd_create("said"), "w+b") as said:
        try:
            process = start(command(code), environment={"TWO": "2"}, stdout=said.fileno())
        finally:
            os.sched_setaffinity(0, own)
        end([process], wait_s=DEADLINE_S)
        said.seek(0)
        assert said.read().decode() == f"1 2 False {tmp_path} { {min(own)} }\n"
    assert "TWO" not in os.environ


def test_passed_descriptors_keep_their_numbers_and_no_others_are_open(command: Command):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    first, (hidden, other_end) = os.memfd_create("first"), os.pipe()
    code = """
import os, socket, sys
wire, first, hidden = map(int, sys.argv[1:])
os.write(first, b"first")
try:
    is_there = "pipe" in os.readlink(f"/proc/self/fd/{hidden}")
except OSError:
    is_there = False
socket.socket(fileno=wire).send(str(is_there).encode())
"""
    with ours, theirs:
        arguments = theirs.fileno(), first, hidden
        process = start(command(code, *arguments), pass_fds=(first, theirs.fileno()))
        assert ours.recv(100) == b"False"
        end([process], wait_s=DEADLINE_S)
    assert (process.poll(), os.pread(first, 10, 0)) == (0, b"first")
    for fd in (first, hidden, other_end):
        os.close(fd)


def test_each_process_draws_other_random_numbers(command: Command) -> None:
    code = "import random, numpy; print(random.random(), numpy.random.random())"
    first, second = (output(command(code), DEADLINE_S).stdout.split() for _ in range(2))
    assert len(first) == 2
    assert not set(first) & set(second)


# How processes end


def test_a_process_that_ignores_sigterm_is_killed() -> None:
    code = "import os, signal; signal.signal(15, signal.SIG_IGN); os.write(1, b'!'); signal.pause()"
    readable, writable = os.pipe()
    process = start(running(code), stdout=writable)
    assert os.read(readable, 1) == b"!"
    end([process], termination_s=0.1)
    assert process.poll() == -signal.SIGKILL
    os.close(readable)
    os.close(writable)


def test_after_the_first_failure_other_processes_have_a_grace_period() -> None:
    codes = ("raise SystemExit(2)", FOREVER, "")
    failing, sleeping, well = processes = [start(running(code)) for code in codes]
    assert wait(processes, grace_s=0.2) == [failing]
    assert sleeping.poll() is None
    end(processes, wait_s=0.0)
    assert well.poll() is not None


@pytest.mark.parametrize(
    ("code", "words"), [(None, "running"), (0, "0"), (3, "3"), (-9, "SIGKILL"), (-15, "SIGTERM")]
)
def test_reasons_name_the_code_or_the_signal(code: int | None, words: str) -> None:
    assert words in reason(code)


HOLDING = """
import os, signal, threading
from paceline.links.signals import blocked
signal.signal(signal.SIGINT, lambda *_: print("handled", flush=True))
threading.Thread(target=threading.Event().wait, daemon=True).start()
with blocked():
    os.kill(os.getpid(), signal.SIGINT)
    for number in range(10**6):
        pass
    print("started", flush=True)
print("over", flush=True)
"""


def test_a_signal_waits_for_a_start_even_if_another_thread_receives_it() -> None:
    assert output(running(HOLDING), DEADLINE_S).stdout.split() == ["started", "handled", "over"]


# A process ends with its parent

STARTS = """
from paceline.links.processes import module_command, start
child = start(module_command("waits", "argument"))
"""
SERVED = """
import os, sys
from paceline.links import forkserver
from paceline.links.memory import KEEPING_MEMORY
from paceline.links.processes import module_command, start
with forkserver.open_server(("json",), KEEPING_MEMORY | os.environ):
    child = start(module_command("forked", "import signal; signal.pause()"))
    print(child.pid, int(open(f"/proc/{child.pid}/stat").read().split()[3]), flush=True)
    signal.pause()
"""
FORKED = """
import forked
from paceline.links.forking import forked_from_here
from paceline.links.processes import module_command, start
def wait():
    while True:
        signal.pause()
forked.run = wait
with forked_from_here():
    child = start(module_command("forked"))  # without a reference the connection would close
    print(child.pid, flush=True)
    signal.pause()
"""


@pytest.mark.parametrize(
    ("code", "victim"),
    [(STARTS, 0), (SERVED, 0), (SERVED, 1), (FORKED, 0)],
    ids=["started", "served", "of a killed server", "forked"],
)
def test_no_process_outlives_its_caller_or_the_fork_server(
    tmp_path: Path, code: str, victim: int
) -> None:
    (tmp_path / "waits.py").write_text("import os\nprint(os.getpid(), flush=True)\n" + FOREVER)
    path = f"{tmp_path}{os.pathsep}{Path(forked.__file__).parent}"
    begin = [sys.executable, "-c", f"import signal\n{code}\nsignal.pause()"]
    with subprocess.Popen(
        begin, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": path}
    ) as parent:
        try:
            child, *servers = map(int, parent.stdout.readline().split())
            assert not has_ended(child, 0.0)
            os.kill((parent.pid, *servers)[victim], signal.SIGKILL)
            assert all(has_ended(pid) for pid in (child, *servers))
        finally:
            parent.kill()


def test_a_process_whose_parent_is_gone_already_dies_at_once() -> None:
    code = "from paceline.links.forkserver import die_with_parent as die\n"
    code += f"die({os.getppid()})\nprint('alive')"  # this process is the parent
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")


MAPPED = """
import ctypes, torch
from paceline.runs.rank import as_rank

class Usage(ctypes.Structure):  # struct mallinfo2; `hblks` is the number of mapped allocations
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks rest".split()]
    _fields_[4] = ("rest", ctypes.c_size_t * 6)

def num_mapped():
    malloc = ctypes.CDLL(None).mallinfo2
    malloc.restype = Usage
    return malloc().hblks

def run(group):
    before = num_mapped()
    large = torch.ones(2**25)
    print(num_mapped() - before)

as_rank(run, 60.0)
"""


@pytest.mark.parametrize(
    ("environment", "expected"), [({}, "0"), ({"MALLOC_MMAP_THRESHOLD_": "65536"}, "1")]
)
def test_a_rank_of_torchrun_keeps_freed_memory_unless_the_user_sets_another_limit(
    environment: dict[str, str], expected: str
) -> None:
    """Malloc returns an allocation to the kernel if it has mapped it alone."""
    command = [sys.executable, "-c", MAPPED]
    alone = os.environ | {"RANK": "0", "WORLD_SIZE": "1"} | environment
    done = subprocess.run(command, env=alone, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected


# The fork server

IMPORTED = "import sys; print('numpy' in sys.modules, __name__, sys.argv[1:])"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (forkserver.ADDRESS, "paceline-nobody"),
        ("OMP_NUM_THREADS", "13"),  # read once per process; a fork cannot change it
        ("OTHER", "without a server"),
    ],
)
def test_commands_that_no_server_can_start_are_started_directly(request, monkeypatch, name, value):
    if name == "OMP_NUM_THREADS":
        request.getfixturevalue("served")
    monkeypatch.setenv(name, value)
    assert output(running(IMPORTED), DEADLINE_S).stdout == "False __main__ []\n"


@pytest.mark.usefixtures("served")
def test_a_script_needs_no_guard_imports_neighbours_and_has_its_command_line(
    tmp_path: Path,
) -> None:
    (tmp_path / "neighbour.py").write_text("WORD = 'found'\n")
    script = tmp_path / "script.py"
    line = "open('/proc/self/cmdline').read().split(chr(0))[3:5]"
    script.write_text(f"import neighbour\n{IMPORTED}\nprint(neighbour.WORD, __file__, {line})\n")
    done = output(module_command(str(script), "word"), DEADLINE_S)
    assert done.stdout == f"True __main__ ['word']\nfound {script} {[str(script), 'word']}\n"


@pytest.mark.usefixtures("served")
def test_a_module_is_found_in_the_folder_and_in_pythonpath(tmp_path: Path, monkeypatch) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.py").write_text(f"{IMPORTED}\n")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "there"))
    for name in ("here", "there"):
        done = output(module_command(name, "x"), DEADLINE_S)
        assert done.stdout == "True __main__ ['x']\n", done.stderr


HANGING = """
import os, signal
from paceline.links.devices import cuda
os.register_at_fork(after_in_child=signal.pause)
cuda._FORK_S = 0.1
print(cuda.can_fork())
"""


@pytest.mark.slow
def test_a_library_that_hangs_in_a_fork_is_not_waited_for() -> None:
    assert output(running(HANGING), DEADLINE_S).stdout == "False\n"
