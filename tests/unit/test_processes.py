import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.links.processes import end, module_command, output, reason, start, wait
from processes import is_running


def python(code: str, *arguments: object) -> list[str]:
    return [sys.executable, "-c", code, *map(str, arguments)]


SLEEP = "import time; time.sleep(600)"
STUBBORN = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf", flush=True)
time.sleep(600)
"""


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_process_says_how_it_ended():
    process = start(python("raise SystemExit(3)"))
    assert process.wait(60)
    assert (process.poll(), reason(process.poll())) == (3, "ended with exit code 3")
    process.close()


def test_a_process_that_runs_is_not_waited_for_longer_than_allowed():
    process = start(python(SLEEP))
    assert not process.wait(0.05)
    assert (process.poll(), reason(process.poll())) == (None, "is running")
    end([process])
    assert (process.poll(), reason(process.poll())) == (-signal.SIGTERM, "was ended by SIGTERM")
    assert not is_running(process.pid)
    end([process])  # again, which changes nothing


def test_a_process_that_ignores_sigterm_is_killed():
    with os.fdopen(os.memfd_create("said"), "w+b") as said:
        process = start(python(STUBBORN), stdout=said)
        while not os.fstat(said.fileno()).st_size:
            time.sleep(0.01)
        end([process], termination_s=0.1)
    assert process.poll() == -signal.SIGKILL


def test_processes_may_end_by_themselves_before_they_are_ended():
    processes = [start(python(f"raise SystemExit({code})")) for code in range(3)]
    end(processes, wait_s=60)
    assert [process.poll() for process in processes] == [0, 1, 2]


def test_after_the_first_failure_the_others_have_a_time_of_grace():
    failing, sleeping, well = processes = [
        start(python(code)) for code in ("raise SystemExit(2)", SLEEP, "")
    ]
    assert wait(processes, grace_s=0.2) == [failing]
    assert sleeping.poll() is None
    end(processes)
    assert well.poll() is not None


def test_a_process_inherits_the_descriptors_that_are_passed_and_no_others():
    own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    hidden = os.memfd_create("hidden", 0)
    code = """
import os, socket, sys
wire = socket.socket(fileno=int(sys.argv[1]))
wire.send(wire.recv(100) + str(os.path.exists(f"/proc/self/fd/{sys.argv[2]}")).encode())
"""
    with own, other:
        process = start(python(code, other.fileno(), hidden), pass_fds=(other.fileno(),))
        own.send(b"hidden is open: ")
        assert own.recv(100) == b"hidden is open: False"
        end([process], wait_s=60)
    os.close(hidden)
    assert process.poll() == 0


def test_an_output_is_read_whole():
    code = "import sys; print('x' * 10**6); print(sys.stdin.read(), file=sys.stderr); sys.exit(4)"
    done = output(python(code), 600)
    assert (done.returncode, done.stdout, done.stderr) == (4, "x" * 10**6 + "\n", "\n")


def test_an_output_that_does_not_come_is_given_up():
    before = num_descriptors()
    with pytest.raises(TimeoutError, match=r"was not done after 0\.2 s, the deadline"):
        output(python(SLEEP), 0.2)
    assert num_descriptors() == before


def test_an_environment_is_added_to_that_of_this_process(monkeypatch):
    monkeypatch.setenv("ONE", "1")
    process = start(
        python("import os; raise SystemExit(int(os.environ['ONE'] + os.environ['TWO']))"),
        environment={"TWO": "2"},
    )
    end([process], wait_s=60)
    assert process.poll() == 12
    assert "TWO" not in os.environ


MODULE = """
import os, sys, time
print(__name__, os.getpid(), *sys.argv[1:], flush=True)
time.sleep(600)
"""
PARENT = """
import time
from paceline.links.processes import module_command, start
start(module_command("sleeps", "argument"))
time.sleep(600)
"""


def test_a_module_dies_with_the_process_that_started_it(tmp_path):
    (tmp_path / "sleeps.py").write_text(MODULE)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(python(PARENT), stdout=subprocess.PIPE, env=environment) as parent:
        name, pid, argument = parent.stdout.readline().split()
        assert (name, argument) == (b"__main__", b"argument")
        assert is_running(int(pid))
        parent.kill()  # which no process can answer to
        deadline = time.monotonic() + 60
        while is_running(int(pid)):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_module_runs_as_python_would_run_it():
    done = output(module_command("json.tool", "--help"), 600)
    assert done.returncode == 0
    assert "json" in done.stdout


def test_a_command_that_does_not_exist_is_an_error():
    with pytest.raises(OSError, match="No such file"):
        start(["/nowhere"])


def test_reasons_are_ends_of_sentences():
    assert reason(0) == "ended with exit code 0"
    assert reason(-9) == "was ended by SIGKILL"


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


def test_a_signal_waits_for_a_start_though_another_thread_takes_it():
    assert output(python(HOLDING), 600).stdout.split() == ["started", "handled", "over"]
