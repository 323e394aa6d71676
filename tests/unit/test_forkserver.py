import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.links import forkserver
from paceline.links.processes import KEEPING_MEMORY, end, module_command, output, start
from processes import DEADLINE_S, is_running


@pytest.fixture(scope="module")
def server():
    """A fork server that has imported numpy."""
    with forkserver.open_server(("numpy",), KEEPING_MEMORY | os.environ):
        yield os.environ.pop(forkserver.ADDRESS)


@pytest.fixture
def forking(server, monkeypatch) -> None:
    monkeypatch.setenv(forkserver.ADDRESS, server)


def python(code: str, *arguments: object) -> list[str]:
    return [sys.executable, "-c", code, *map(str, arguments)]


def wait_until(condition) -> None:
    until = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


IMPORTED = "import sys; print('numpy' in sys.modules, __name__, sys.argv[1:])"


def test_a_forked_process_has_what_the_server_has_imported(forking):
    done = output(python(IMPORTED, "an", "argument"), DEADLINE_S)
    assert (done.returncode, done.stdout) == (0, "True __main__ ['an', 'argument']\n")


def test_without_a_server_it_is_started_the_ordinary_way():
    assert output(python(IMPORTED), DEADLINE_S).stdout == "False __main__ []\n"


def test_what_is_read_once_is_not_changed_by_a_fork(forking, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "13")
    assert output(python(IMPORTED), DEADLINE_S).stdout == "False __main__ []\n"


def test_a_script_needs_no_guard_and_finds_its_neighbours(forking, tmp_path):
    (tmp_path / "neighbour.py").write_text("WORD = 'found'\n")
    script = tmp_path / "script.py"
    script.write_text(f"import neighbour\n{IMPORTED}\nprint(neighbour.WORD, __file__)\n")
    done = output([sys.executable, str(script)], DEADLINE_S)
    assert done.stdout == f"True __main__ []\nfound {script}\n"


def test_a_module_is_found_in_the_folder_and_in_pythonpath(forking, tmp_path, monkeypatch):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.py").write_text(f"{IMPORTED}\n")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "there"))
    for name in ("here", "there"):
        done = output(module_command(name, "x"), DEADLINE_S)
        assert done.stdout == "True __main__ ['x']\n", done.stderr


def test_a_forked_process_has_the_environment_and_cores_of_who_asks(forking, monkeypatch):
    monkeypatch.setenv("ONE", "1")
    monkeypatch.delenv("HOME", raising=False)
    code = "import os; print(os.environ['ONE'], os.environ['TWO'], 'HOME' in os.environ)"
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(own)})
    with os.fdopen(os.memfd_create("said"), "w+b") as said:
        try:
            print_cores = f"{code}; print(os.sched_getaffinity(0))"
            process = start(python(print_cores), environment={"TWO": "2"}, stdout=said)
        finally:
            os.sched_setaffinity(0, own)
        end([process], wait_s=DEADLINE_S)
        said.seek(0)
        assert said.read().decode() == f"1 2 False\n{ {min(own)} }\n"


def test_a_forked_process_has_the_descriptors_that_are_passed(forking):
    first, second = os.memfd_create("first"), os.memfd_create("second")
    code = "import os, sys; [os.write(int(fd), fd.encode()) for fd in sys.argv[1:]]"
    process = start(python(code, first, second), pass_fds=(second, first))
    end([process], wait_s=DEADLINE_S)
    assert process.poll() == 0
    for fd in (first, second):
        assert os.pread(fd, 10, 0) == str(fd).encode()
        os.close(fd)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("raise SystemExit(3)", 3),
        ("raise ValueError", 1),
        ("import os; os.abort()", -signal.SIGABRT),
        ("import sys; sys.exit('said')", 1),
    ],
)
def test_a_forked_process_ends_as_any_other(forking, code, expected):
    assert output(python(code), DEADLINE_S).returncode == expected


def test_a_forked_process_is_ended(forking):
    process = start(python("import time; time.sleep(600)"))
    assert process.poll() is None
    assert is_running(process.pid)
    end([process])
    assert process.poll() in (-signal.SIGTERM, -signal.SIGKILL, 128 + signal.SIGTERM)
    assert not is_running(process.pid)


def test_forked_processes_draw_other_random_numbers(forking):
    code = "import random, numpy; print(random.random(), numpy.random.random())"
    first, second = (output(python(code), DEADLINE_S).stdout.split() for _ in range(2))
    assert not set(first) & set(second)


def test_a_forked_process_has_its_own_command_line(forking):
    process = start(python("import time; time.sleep(600)", "word"))
    path = Path(f"/proc/{process.pid}/cmdline")
    wait_until(lambda: path.read_bytes().rstrip(b"\0").endswith(b"\0word"))
    end([process])


PARENT = """
import os, sys, time
from paceline.links import forkserver
from paceline.links.processes import KEEPING_MEMORY, start
with forkserver.open_server(("json",), KEEPING_MEMORY | os.environ):
    child = start([sys.executable, "-c", "import time; time.sleep(600)"])
    print(child.pid, int(open(f"/proc/{child.pid}/stat").read().split()[3]), flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("victim", ["who asked", "the server"])
def test_no_forked_process_outlives_who_asked_or_the_server(victim):
    with subprocess.Popen(python(PARENT), stdout=subprocess.PIPE, text=True) as parent:
        child, server = map(int, parent.stdout.readline().split())
        assert is_running(child)
        assert server != parent.pid
        os.kill(parent.pid if victim == "who asked" else server, signal.SIGKILL)
        wait_until(lambda: not is_running(child) and not is_running(server))
        parent.kill()


def test_a_server_that_is_gone_is_not_needed(monkeypatch):
    monkeypatch.setenv(forkserver.ADDRESS, "paceline-nobody")
    assert output(python(IMPORTED), DEADLINE_S).stdout == "False __main__ []\n"


HANGING = """
import os, time
from paceline.devices import cuda
os.register_at_fork(after_in_child=lambda: time.sleep(600))
cuda._FORK_S = 0.1
print(cuda.can_fork())
"""


def test_a_library_that_hangs_in_a_fork_is_not_waited_for():
    with subprocess.Popen(python(HANGING), stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.communicate(timeout=DEADLINE_S)[0] == "False\n"
        finally:
            process.kill()
