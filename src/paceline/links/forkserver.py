"""Fork processes from a server that has already imported torch, so they start in milliseconds.

`open_server(modules)` starts the server, which imports `modules` while this process continues. From
then on `paceline.links.processes.start` asks the server to fork processes. Child processes read the
server's address from PACELINE_FORK_SERVER, and ask the same server.

    this process ──connect──► server ──fork──► a process per connection
        │    request: command, environment, folder, cores; descriptors by SCM_RIGHTS
        │    ◄── the process number, and later the exit code
        └─ closes the connection, or dies: the server kills the process

The server dies with the process that opened it, and the server's forks die with the server. It
has one thread, computes nothing and never touches a GPU, so that it can be forked. Some environment
variables, such as OMP_NUM_THREADS, take effect only while libraries are loaded. The server refuses
requests that change such variables; `start` then starts a new program instead.
"""

import ctypes
import fcntl
import gc
import importlib
import json
import os
import random
import re
import runpy
import secrets
import selectors
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from paceline.links import signals

ADDRESS = "PACELINE_FORK_SERVER"
MAX_NBYTES = 2**20  # size limit of a request
OF_WORKERS = ["-m", "paceline.links.processes"]  # arguments of Python in each `module_command`
_MAX_FDS = 64
# Environment variables that take effect only while libraries are loaded.
_READ_ONCE = re.compile(r"(ATEN|GOMP|KMP|LD|MALLOC|MKL|OMP|OPENBLAS|TORCH)_|PYTHON(?!PATH$)")
_NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
_TITLE_LENGTH = 4096
_PDEATHSIG = 1  # PR_SET_PDEATHSIG: see prctl(2)
_CREDENTIALS = struct.Struct("3i")  # a peer's process number, user id and group id


@dataclass
class ForkRequest:
    """A request to fork a process.

    `fds`: numbers that the passed descriptors get in the new process. `received`: their numbers in
    the server.
    """

    command: list[str]
    environment: dict[str, str]
    folder: str
    cores: list[int]
    fds: list[int]
    received: list[int] = field(default_factory=list)


@contextmanager
def open_server(modules: Sequence[str], environment: Mapping[str, str]) -> Iterator[None]:
    """Keep a fork server running inside the block; a new server first imports `modules`."""
    if ADDRESS in os.environ:
        yield
        return
    address, listener = listen()
    arguments = [str(listener.fileno()), str(os.getpid()), *modules, " " * _TITLE_LENGTH]
    with signals.blocked():
        process = subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-m", __spec__.name, *arguments],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # standard output is reserved for the command's result
            pass_fds=(listener.fileno(),),
        )
    listener.close()
    os.environ[ADDRESS] = address
    try:
        yield
    finally:
        os.environ.pop(ADDRESS, None)
        process.kill()
        process.wait()


def listen() -> tuple[str, socket.socket]:
    """Listen on a new abstract Unix address, which needs no file; return address and socket."""
    address = f"paceline-{secrets.token_hex(16)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind("\0" + address)
    listener.listen(128)
    return address, listener


def serve(listener: socket.socket, environment: Mapping[str, str]) -> None:
    """Fork processes on request; in a fork, run the requested module.

    `environment`: the server's environment variables before it imported modules.
    """
    retitle([sys.executable, "-m", "paceline.links.forkserver"])
    request = ForkServer(listener, environment).serve()
    # Children also need the variables that imports set, such as KMP_INIT_AT_FORK (by sklearn).
    by_imports = {name: os.environ[name] for name in os.environ.keys() - environment.keys()}
    by_imports.pop(_NVML_CHECK, None)
    request.environment = by_imports | request.environment
    become(request)
    known = environment.get("PYTHONPATH", "").split(os.pathsep)
    added = [entry for entry in sys.path[1:] if entry not in known]
    own = request.environment.get("PYTHONPATH", "")
    sys.path[:] = [str(Path.cwd()), *filter(None, own.split(os.pathsep)), *added]
    for stream, is_lines in ((sys.stdout, os.isatty(1)), (sys.stderr, True)):
        stream.reconfigure(line_buffering=is_lines)  # type: ignore[union-attr]
    retitle(request.command)
    run_module(request.command[1 + len(OF_WORKERS) :])


class ForkServer:
    """Forks a child for each request on a socket.

    `environment`: the environment in which this process loaded libraries. The server refuses
    requests that change a variable that libraries read while loading. If `environment` is None,
    the server accepts all requests.
    """

    def __init__(
        self, listener: socket.socket, environment: Mapping[str, str] | None = None
    ) -> None:
        self._read_once = None if environment is None else _read_once(environment)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._pids: dict[socket.socket, int] = {}
        self._forked: ForkRequest | None = None  # in a forked child: the request for it

    def serve(self) -> ForkRequest:
        """Fork processes on request; in a forked process, return the request for that process."""
        while self._forked is None:
            for key, _ in self._selector.select():
                # Handling an earlier event may have closed this event's connection.
                if self._forked is None and self._selector.get_map().get(key.fd) is key:
                    key.data(key.fileobj)
        # The child closes the server's descriptors.
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
            else:
                os.close(key.fd)
        self._selector.close()
        return self._forked

    def _accept(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        # Anyone on this machine can connect to an abstract address.
        if _CREDENTIALS.unpack(peer)[1] == os.getuid():
            self._selector.register(connection, selectors.EVENT_READ, self._receive)
        else:
            connection.close()

    def _receive(self, connection: socket.socket) -> None:
        """Handle a packet: the first is the request, later packets are signals for its process.

        An empty packet is the end of the connection, which kills the process.
        """
        try:
            packet, fds, _, _ = socket.recv_fds(connection, MAX_NBYTES, _MAX_FDS)
        except ConnectionError:
            packet, fds = b"", []
        pid = self._pids.get(connection)
        if not packet:
            self._drop(connection)
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
        elif pid is not None:
            os.kill(pid, struct.unpack("i", packet)[0])
        else:
            self._fork(connection, ForkRequest(**json.loads(packet) | {"received": fds}))

    def _fork(self, connection: socket.socket, request: ForkRequest) -> None:
        server, pid, refused = os.getpid(), -1, ""
        if self._read_once is not None:
            differing = self._read_once ^ _read_once(request.environment)
            refused = ", ".join(sorted({f"{name} differs" for name, _ in differing}))
        if not refused:
            try:
                pid = os.fork()
            except OSError as error:
                refused = str(error)
        if refused:
            self._answer(connection, {"refused": refused})
            _close(request.received)
            return
        if pid == 0:
            die_with_parent(server)
            self._forked = request
            return
        _close(request.received)
        self._pids[connection] = pid
        reap = partial(self._reap, connection)
        self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, reap)
        self._answer(connection, {"pid": pid})

    def _reap(self, connection: socket.socket, pidfd: int) -> None:
        self._selector.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(self._pids.pop(connection), 0)
        if connection.fileno() >= 0:
            self._answer(connection, {"code": os.waitstatus_to_exitcode(status)})
            self._drop(connection)

    def _answer(self, connection: socket.socket, answer: dict[str, Any]) -> None:
        with suppress(OSError):  # the client may be gone
            connection.send(json.dumps(answer).encode())

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        connection.close()


def _read_once(environment: Mapping[str, str]) -> set[tuple[str, str]]:
    return {(name, value) for name, value in environment.items() if _READ_ONCE.match(name)}


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def become(request: ForkRequest) -> None:
    """Give a fresh fork the requested descriptors, environment, folder and cores."""
    # First move all descriptors to free numbers: a descriptor may occupy the number that another
    # descriptor shall get.
    above = max(request.fds) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for fd in request.received]
    _close(request.received)
    for fd, number in zip(moved, request.fds, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(request.environment, PACELINE_LAUNCHER=str(os.getppid()))
    os.chdir(request.folder)
    os.sched_setaffinity(0, request.cores)
    importlib.invalidate_caches()
    signals.handle_in_worker()
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # else all forks would draw equal random numbers


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent, process `parent`, ends."""
    number = ctypes.c_ulong(signal.SIGKILL)
    if ctypes.CDLL(None, use_errno=True).prctl(_PDEATHSIG, number) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # the parent ended before the call, so the kernel sends no signal
        os.kill(os.getpid(), signal.SIGKILL)


def retitle(command: Sequence[str]) -> None:
    """Overwrite the command line that `ps` shows for this process."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])  # arg_start and arg_end: see proc(5)
    length = min(end - begin, _TITLE_LENGTH)
    text = "\0".join(command).encode()[: length - 1]
    ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


def run_module(arguments: Sequence[str]) -> None:
    """Run a FILE.py or module as Python does, or call `main` of an imported module."""
    sys.argv = list(arguments)
    what = sys.argv[0]
    if what.endswith(".py"):
        sys.path[0] = str(Path(what).resolve().parent)
        runpy.run_path(what, run_name="__main__")
        return
    if what.startswith("paceline."):
        importlib.import_module(what)
    module = sys.modules.get(what)
    if module is not None and hasattr(module, "main"):
        module.main()
    else:
        runpy.run_module(what, run_name="__main__", alter_sys=True)


def main() -> None:
    """Import the modules named in the arguments, and serve on the inherited listening socket."""
    fd, parent, *modules = sys.argv[1:-1]
    die_with_parent(int(parent))
    # Ctrl-C signals the whole process group; only the forked processes handle it.
    signal.pthread_sigmask(signal.SIG_BLOCK, signals.SIGNALS)
    environment = dict(os.environ)
    # Imports may count GPUs. Let PyTorch count through NVML, because counting through CUDA would
    # initialise CUDA, and then no fork could use GPUs.
    os.environ.setdefault(_NVML_CHECK, "1")
    for module in modules:
        importlib.import_module(module)
    if "torch" in sys.modules:
        from paceline.links.devices import cuda

        if not cuda.can_fork():  # an import has initialised CUDA
            return
    gc.collect()
    gc.freeze()  # a child's garbage collection would write to inherited memory, and so copy it
    serve(socket.socket(fileno=int(fd)), environment)


if __name__ == "__main__":
    main()
