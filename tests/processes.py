"""Run commands in new process groups with a deadline, and find processes left over.

Commands of this Python are forked from a process that has imported torch and paceline. This saves
four seconds of CPU time for each command and for each of its workers.
"""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

from paceline.links import forkserver
from paceline.links.memory import KEEPING_MEMORY
from paceline.links.processes import fork, module_command

DEADLINE_S = 600.0  # for hanging commands; no test fails for being slow
ENDING_S = 30.0  # time for the kernel to end processes on a busy machine
_TIMEOUTS = TimeoutError, subprocess.TimeoutExpired


def awaited(found: Callable[[], Any]) -> Any:
    """Poll until `found` returns a true value, and return the value."""
    until = time.monotonic() + DEADLINE_S / 4
    while not (value := found()):
        assert time.monotonic() < until
        time.sleep(0.05)
    return value


def beside(function: Callable[..., Any], *arguments: Any, **options: Any) -> Future[Any]:
    """Call a function in a new thread."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function(*arguments, **options))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def has_ended(pid: int, deadline_s: float = DEADLINE_S) -> bool:
    """Wait for a process, not necessarily a child; return whether it ended in time."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    try:
        return bool(poll.poll(deadline_s * 1e3))
    finally:
        os.close(pidfd)


def _processes() -> Iterator[tuple[int, str, int, int, str]]:
    """Yield the id, state, parent, group and command line of each process."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, group = stat.read_text().rpartition(")")[2].split()[:3]
            command = (stat.parent / "cmdline").read_text().rstrip("\0").replace("\0", " ")
        except OSError:
            continue
        yield int(stat.parent.name), state, int(parent), int(group), command


def members_of(group: int) -> dict[int, str]:
    """Return the running processes of a process group, with their command lines."""
    found = _processes()
    return {pid: said for pid, state, _, own, said in found if own == group and state not in "ZX"}


def children_of(parent: int, word: str) -> list[int]:
    """Return the child processes of `parent` whose command line contains `word`."""
    return [pid for pid, _, own, _, said in _processes() if own == parent and word in said]


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """Reserve a port of the loopback address for a process that listens on this number.

    Such a process, e.g. torch's store, can reuse an address on which no process listens.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@dataclass
class Finished:
    code: int
    out: str
    err: str


LEADING = Path(__file__).parent / "leading.py"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
SIMULATED_GPUS = Path(__file__).parent / "simulated_gpu" / "children"  # for PYTHONPATH
IMPORTED = (
    "simulated_gpu.instead",  # before modules that look for devices
    "paceline.runs.launching",
    "paceline.commands.app",
    "paceline.integrations.data_parallel",
    "paceline.links.launch",
    "paceline.strategies.hogbatch.run",
    "paceline.strategies.hogbatch.worker",
    "paceline.strategies.local.run",
    "paceline.strategies.subbatch.run",
    "paceline.strategies.wheel.run",
    "paceline.strategies.wheel.worker",
    "paceline.studies.probe.probe_ranks",
    "paceline.studies.profile.profile_ranks",
    "paceline.studies.profile.largest_batch",
    "hypothesis",
    "pytest",
    "sklearn.datasets",
    "torch.distributed.run",
)

SET_BY_IMPORTS = ("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK")
SHARED_SERVER = "PACELINE_TESTS_FORK_SERVER"  # address of the test run's fork server


@cache
def fork_server() -> str:
    """Return the address of the tests' fork server, which ends with the opening process."""
    if SHARED_SERVER in os.environ:
        return os.environ[SHARED_SERVER]
    left_out = ("PYTHONPATH", *SET_BY_IMPORTS)
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    environment |= ENVIRONMENT | KEEPING_MEMORY | {"PYTHONPATH": str(Path(__file__).parent)}
    opened = forkserver.open_server(IMPORTED, environment)
    opened.__enter__()
    _OPENED.append(opened)  # a reference, so that it stays open
    return os.environ.pop(forkserver.ADDRESS)


_OPENED: list[object] = []


class _Forked:
    """A forked command, with the methods of Popen that tests use."""

    def __init__(self, command: list[str], cwd: Path, environment: Mapping[str, str]) -> None:
        (out, stdout), (err, stderr) = os.pipe(), os.pipe()
        try:
            leading = module_command(str(LEADING), str(cwd), *command)
            fds = {0: _nothing(), 1: stdout, 2: stderr}
            self._forked = own = fork(leading, environment, fds, fork_server())
        finally:
            os.close(stdout)
            os.close(stderr)
        self.stdout, self.stderr = os.fdopen(out), os.fdopen(err)
        self.pid, self.poll, self.send_signal = own.pid, own.poll, own.send
        self._outputs: list[Future[str]] = []

    def wait(self, timeout: float = DEADLINE_S) -> int | None:
        if not self._forked.wait(timeout):
            raise TimeoutError
        self._forked.close()
        return self.poll()

    def communicate(self, timeout: float) -> list[str]:
        until = time.monotonic() + timeout
        streams = self.stdout, self.stderr
        self._outputs = self._outputs or [beside(_drained, one) for one in streams]
        found = [one.result(max(0.0, until - time.monotonic())) for one in self._outputs]
        self.wait(max(0.1, until - time.monotonic()))
        return found

    def close(self) -> None:
        """Close the output, unless a thread still reads it because another process has it open."""
        if all(one.done() for one in self._outputs):
            self.stdout.close()
            self.stderr.close()


def _drained(stream: IO[str]) -> str:
    with stream:
        return stream.read()


@contextlib.contextmanager
def forking() -> Iterator[None]:
    """Fork the processes that Paceline starts in this process, too."""
    os.environ[forkserver.ADDRESS] = fork_server()
    try:
        yield
    finally:
        del os.environ[forkserver.ADDRESS]


@cache
def _nothing() -> int:
    return os.open(os.devnull, os.O_RDONLY)


class Started:
    """A command in a new process group.

    A command of this Python is forked, unless it needs a GPU or `afresh` is True.
    """

    def __init__(
        self, command: list[str], cwd: Path, on_gpu: bool = False, afresh: bool = False
    ) -> None:
        path = f"{cwd}{os.pathsep}{SIMULATED_GPUS}"
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        for name in SET_BY_IMPORTS:  # the fork server sets its own values
            environment.pop(name, None)
        if not on_gpu:  # tests have more workers than the machine may have GPUs
            environment["CUDA_VISIBLE_DEVICES"] = ""
        self.process: Any
        if command[0] == sys.executable and not (on_gpu or afresh):
            try:
                self.process = _Forked(command, cwd, KEEPING_MEMORY | environment)
                return
            except OSError:  # the test changes variables that libraries read once
                pass
        self.process = subprocess.Popen(
            command,
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def finish(self, deadline_s: float = DEADLINE_S) -> Finished:
        """Wait for the end of the command; kill a hanging command and show its output.

        The deadline is at least DEADLINE_S, because a busy machine is slow.
        """
        deadline_s = max(deadline_s, DEADLINE_S)
        try:
            out, err = self.process.communicate(timeout=deadline_s)
        except _TIMEOUTS:
            self.kill()
            try:
                out, err = self.process.communicate(timeout=ENDING_S)
            except _TIMEOUTS:
                out, err = "a process outside the group", " keeps the output open"
            raise AssertionError(f"not done after {deadline_s:g} s: {out}{err}") from None
        return Finished(self.process.poll(), out, err)

    def members(self) -> dict[int, str]:
        """Return the running processes of the group, with their command lines.

        After the command's end, wait until the kernel has ended its child processes.
        """
        until = time.monotonic() + ENDING_S
        while self.process.poll() is not None and members_of(self.process.pid):
            if time.monotonic() > until:
                break
            time.sleep(0.01)
        return members_of(self.process.pid)

    def close(self) -> None:
        """Close the output."""
        if isinstance(self.process, _Forked):
            self.process.close()
        else:
            self.process.stdout.close()
            self.process.stderr.close()

    def workers(self) -> list[int]:
        """Return the process ids of the ranks in ascending order."""
        return sorted(
            pid for pid, command in self.members().items() if "paceline.runs.launching" in command
        )

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
