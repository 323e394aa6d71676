"""Start, watch and end processes, so that none outlives the process that started it.

    command = module_command("paceline.runs.launching", settings.model_dump_json())
    process = start(command, environment={"RANK": "0"}, pass_fds=(socket.fileno(),))
    selector.register(process, selectors.EVENT_READ)  # readable once the process has ended
    failed = wait([process], grace_s=5) # until all have ended, or 5 s after the first failure
    end([process])                      # SIGTERM, and SIGKILL after 2 s

Standard input is /dev/null. Descriptors in `pass_fds` keep their numbers. The kernel kills the
process when the process that started it ends, even by SIGKILL. Inside
`paceline.links.forking.forked_from_here`, processes are forks of this process.
"""

import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from paceline.links import signals
from paceline.links.forkserver import (
    ADDRESS,
    MAX_NBYTES,
    OF_WORKERS,
    ForkRequest,
    die_with_parent,
    run_module,
)
from paceline.links.memory import KEEPING_MEMORY

STANDARD_ERROR = 2
TERMINATION_S = 2.0  # time for a process to end its own children and write its results
_ANSWER_S = 120.0  # deadline for an answer of a fork server that still imports modules
PARENT = "PACELINE_LAUNCHER"
# Open blocks of `forked_from_here`: each block's thread, and the address of its fork server.
servers_from_here: list[tuple[int, str]] = []


def is_started_by_parent() -> bool:
    """Return True if this process's parent started this process with `start`."""
    return os.environ.get(PARENT) == str(os.getppid())


class Process:
    """A started process; a selector reports it as readable once it has ended."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self.pid = child.pid
        self._child = child
        self._pidfd = os.pidfd_open(child.pid)

    def fileno(self) -> int:
        """Return a descriptor that is readable once the process has ended."""
        return self._pidfd

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        return self._child.poll()

    def wait(self, deadline_s: float) -> bool:
        """Wait at most `deadline_s` seconds; return True if the process has ended."""
        if self.poll() is None:
            _await_readable(self, max(0.0, deadline_s))
        return self.poll() is not None

    def send(self, number: int) -> None:
        """Send a signal, if the process runs."""
        self._child.send_signal(number)

    def close(self) -> None:
        """Kill the process if it runs, wait for its end, and close the descriptor."""
        if self._pidfd >= 0:
            self.send(signal.SIGKILL)
            self._child.wait()
            os.close(self._pidfd)
            self._pidfd = -1


class ForkedProcess(Process):
    """A process forked by a fork server, controlled over a connection to the server."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.pid = pid
        self._connection = connection
        self._code: int | None = None

    def fileno(self) -> int:
        """Return the connection's descriptor, over which the exit code arrives."""
        return self._connection.fileno()

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        if self._code is None and self.fileno() >= 0:
            with suppress(BlockingIOError):
                try:
                    packet = _received(self._connection)
                except ConnectionResetError:
                    # The server sent the exit code, and closed the connection without reading our
                    # last signal. The first read then raises; the second returns the exit code.
                    packet = _received(self._connection)
                # Without an exit code, the server has died and the kernel has killed the process.
                self._code = json.loads(packet)["code"] if packet else -signal.SIGKILL
        return self._code

    def send(self, number: int) -> None:
        """Send a signal through the server, which knows whether the process still exists."""
        with suppress(OSError):
            self._connection.send(struct.pack("i", number))

    def close(self) -> None:
        """Kill the process if it runs, wait for its end, and close the connection."""
        if self.fileno() >= 0:
            self.send(signal.SIGKILL)
            while not self.wait(_ANSWER_S):
                pass
            self._connection.close()


def _received(connection: socket.socket) -> bytes:
    return connection.recv(MAX_NBYTES, socket.MSG_DONTWAIT)


def _await_readable(what: Process | socket.socket, within_s: float) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(what, selectors.EVENT_READ)
        selector.select(within_s)


def reason(code: int | None) -> str:
    """Describe an exit code in words, such as "was ended by SIGKILL"."""
    if code is None:
        return "is running"
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def module_command(module: str, *arguments: str) -> list[str]:
    """Return a command with which `start` runs a module (like `python -m`) or a FILE.py."""
    return [sys.executable, *OF_WORKERS, module, *arguments]


def start(
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
    stdout: int | None = None,
    stderr: int | None = None,
) -> Process:
    """Start a process of `module_command`; raise OSError if it cannot be started.

    `environment` is added to this process's environment.
    """
    added = {PARENT: str(os.getpid())} | dict(environment or {})
    whole = KEEPING_MEMORY | os.environ | added
    with Path(os.devnull).open() as nothing:
        fds = {0: nothing.fileno(), 1: stdout or 1, 2: stderr or 2} | {fd: fd for fd in pass_fds}
        if servers_from_here:
            own = [one for thread, one in servers_from_here if thread == threading.get_ident()]
            return fork(command, whole, fds, own[-1] if own else servers_from_here[-1][1])
        if ADDRESS in os.environ:
            with suppress(OSError):  # if the server refuses, start a new program below
                return fork(command, whole, fds, os.environ[ADDRESS])
    with signals.blocked():  # the new process unblocks signals once it handles them
        child = subprocess.Popen(  # noqa: S603 - a command of our own
            command,
            env=whole,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            pass_fds=pass_fds,
        )
    return Process(child)


def fork(
    command: Sequence[str], environment: Mapping[str, str], fds: Mapping[int, int], address: str
) -> ForkedProcess:
    """Ask the server at `address` to fork a process; raise OSError if the server refuses.

    `fds` maps the new process's descriptor numbers to those of this process.
    """
    cores = sorted(os.sched_getaffinity(0))
    request = ForkRequest(list(command), dict(environment), str(Path.cwd()), cores, list(fds))
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect("\0" + address)
        socket.send_fds(connection, [json.dumps(vars(request)).encode()], list(fds.values()))
        _await_readable(connection, _ANSWER_S)
        answer = json.loads(_received(connection) or "{}")
        if "pid" not in answer:
            raise OSError(answer.get("refused", "the fork server has ended"))
    except OSError:
        connection.close()
        raise
    return ForkedProcess(connection, answer["pid"])


def wait(
    processes: Iterable[Process],
    grace_s: float,
    is_saving: Callable[[int], bool] = lambda code: False,
) -> list[Process]:
    """Wait until all processes have ended, but at most `grace_s` after the first failure.

    Returns the processes that ended with another code than 0, in the order of their ends. An end by
    SIGINT or SIGTERM does not count as the first failure if `is_saving(code)` is True, because the
    other processes are then still saving their state.
    """
    failed: list[Process] = []
    deadline: float | None = None
    with selectors.DefaultSelector() as selector:
        for process in processes:
            selector.register(process, selectors.EVENT_READ, process)
        while selector.get_map():
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                break
            for key, _ in selector.select(left):
                selector.unregister(key.fileobj)
                ended: Process = key.data
                if ended.poll() != 0:
                    failed.append(ended)
                    code = ended.poll() or 0
                    if code in signals.EXIT_CODES and is_saving(code):
                        continue
                    deadline = deadline or time.monotonic() + grace_s
    return failed


def end(
    processes: Sequence[Process], *, wait_s: float = 0.0, termination_s: float = TERMINATION_S
) -> None:
    """Send SIGTERM to processes still running after `wait_s`, and SIGKILL `termination_s` later."""
    deadline = time.monotonic() + wait_s
    for process in processes:
        process.wait(deadline - time.monotonic())
    running = [process for process in processes if process.poll() is None]
    if termination_s > 0:
        for process in running:
            process.send(signal.SIGTERM)
        deadline = time.monotonic() + termination_s
        for process in running:
            process.wait(deadline - time.monotonic())
    for process in processes:
        process.close()


def output(
    command: Sequence[str], deadline_s: float, termination_s: float = 5.0
) -> subprocess.CompletedProcess[str]:
    """Return a command's exit code and output; raise TimeoutError if it exceeds `deadline_s`."""
    # Use files in memory: with pipes, the process would block once a pipe is full.
    with _memory_file() as out, _memory_file() as err:
        process = start(command, stdout=out.fileno(), stderr=err.fileno())
        try:
            if not process.wait(deadline_s):
                raise TimeoutError(f"did not end within {deadline_s:g} s")
        finally:
            end([process], termination_s=termination_s)
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess(command, process.poll() or 0, out.read(), err.read())


def _memory_file() -> TextIO:
    fd = os.memfd_create("paceline-output")
    return os.fdopen(fd, "w+", encoding="utf-8", errors="replace", newline="")


def main() -> None:
    """Run the module named in the first argument; die with the process that started this one."""
    signals.handle_in_worker()
    die_with_parent(int(os.environ[PARENT]))
    run_module(sys.argv[1:])


if __name__ == "__main__":
    main()
