"""Fork processes from this one, so that they have its objects: a recipe's data and its closures.

    with forked_from_here():                       # from now on
        start(module_command("paceline.x", "y"))   # has `paceline.x.main` run in a fork

A fork server (`links.forkserver`) forks them, which is a fork of this process itself:

    a thread of its own ──os.fork──► the server, that thread alone ──os.fork──► a process a start

For OpenMP a process may be forked only by a thread that has not computed in parallel: the others it
would wait for in the fork for ever. In the fork that thread is the main one, which gets signals.
The kernel ends a fork together with the thread that made it, so the thread stays until the end.

Processes have the objects of the moment at which the context began. Memory is shared until it is
written to. Descriptors are not: sockets, pipes and what else belongs to this process are taken away
from a fork, and a file that is only read gets a position of its own.
"""

import ctypes
import fcntl
import gc
import importlib
import io
import os
import signal
import socket
import stat
import sys
import threading
import traceback
import warnings
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import NoReturn, TextIO

from paceline.core.errors import InvalidInput
from paceline.links import processes
from paceline.links.forkserver import OF_WORKERS, ForkRequest, ForkServer, become, listen
from paceline.links.signals import SIGNALS
from paceline.native import die_with_parent

_OPEN = Path("/proc/self/fd")
_MALLOPT = {"MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_MMAP_THRESHOLD_": -3}  # see mallopt(3)
_MOST_INT = 2**31 - 1
_CHECK_S = 60.0  # for a GPU's driver on a busy machine


@contextmanager
def forked_from_here() -> Iterator[None]:
    """Have processes of this package forked from this one meanwhile.

    None of them outlives it. Raises InvalidInput if what they compute with does not survive a fork,
    OSError if there can be no more processes.
    """
    address, listener = listen()
    with listener:
        server = _Server(listener)
    entry = threading.get_ident(), address
    processes.servers_from_here.append(entry)
    try:
        _check()
        yield
    finally:
        processes.servers_from_here.remove(entry)
        server.close()


class _Server:
    """A fork of this process that forks others, and the thread with which all of them end."""

    def __init__(self, listener: socket.socket) -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # there may be none, or one of the user's
                stream.flush()
        self._listener, self._of = listener, os.getpid()
        self._forked = SimpleQueue[int | OSError]()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._fork, name="paceline forks", daemon=True)
        self._thread.start()
        found = self._forked.get()
        if isinstance(found, OSError):
            raise found
        self._pid = found

    def _fork(self) -> None:
        # A signal waits until the fork has let go of the handlers of this program.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            with warnings.catch_warnings():  # Python warns of forks of processes with threads
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
        except OSError as error:
            self._forked.put(error)
            return
        if pid == 0:
            _serve(self._listener, self._of, before)
        self._forked.put(pid)
        self._is_over.wait()

    def close(self) -> None:
        """Kill the server, with which the kernel ends what it has forked."""
        with suppress(ProcessLookupError, ChildProcessError):  # the program waits for all children
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        self._is_over.set()
        self._thread.join()


def _check() -> None:
    from paceline.links.devices import num_gpus  # imports torch, which the command line does later

    if not num_gpus():  # cores alone can always be computed with
        return
    try:
        code = processes.output(processes.module_command(__name__), _CHECK_S).returncode
    except TimeoutError:
        code = 1
    if code:
        raise InvalidInput(
            "model",
            "a recipe's workers are forked from this program, which has used a GPU, or gone "
            "through a backward pass where there is one: they could not do it again",
            hint="name the recipe as package.module:factory, or run this program under torchrun",
        )


def main() -> None:
    """End this fork with code 1 unless it can compute on all of its devices."""
    from paceline.links.devices import can_compute_in_fork

    if not can_compute_in_fork():
        sys.exit(1)


def _serve(listener: socket.socket, parent: int, mask: Iterable[int]) -> NoReturn:
    """Fork what is asked for; in a fork, run that as Python runs a program, and end the process.

    `mask`: the signals that are blocked in the program. Nothing that it would do at its end is
    done, and nothing of it is freed.
    """
    code: object = 1
    try:
        die_with_parent(parent)
        gc.freeze()  # a collection would write to, and so copy, all of it
        for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        # Those that end a run wait until this is one of its processes.
        signal.pthread_sigmask(signal.SIG_SETMASK, {*mask, *SIGNALS})
        _let_go([listener.fileno()])
        _run_module(ForkServer(listener).serve())
        code = 0
    except SystemExit as error:
        code = error.code or 0
        if not isinstance(code, int):
            sys.stderr.write(f"{code}\n")
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(code if isinstance(code, int) else 1)


def _run_module(request: ForkRequest) -> None:
    """Become the process that was asked for, and run its module."""
    _let_go(request.received)
    become(request)
    sys.stdin, sys.stdout, sys.stderr = _stream(0, "r"), _stream(1, "w"), _stream(2, "w")
    _keep_memory()
    sys.argv = request.command[1 + len(OF_WORKERS) :]
    importlib.import_module(sys.argv[0]).main()


def _stream(fd: int, mode: str) -> TextIO:
    """Return a stream as Python has it at first: a program may have put others in their places."""
    binary = io.FileIO(fd, mode, closefd=False)
    buffered = io.BufferedWriter(binary) if mode == "w" else io.BufferedReader(binary)
    return io.TextIOWrapper(buffered, errors="backslashreplace", line_buffering=True)


def _let_go(kept: Collection[int]) -> None:
    """Take the other descriptors away from this process.

    They become /dev/null: an object that believes to own a number might close it, or write to it,
    when another file has it. Files and folders stay.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in [int(path.name) for path in _OPEN.iterdir()]:
        with suppress(OSError):  # the descriptor by which the folder was listed
            mode = os.fstat(fd).st_mode
            if stat.S_ISREG(mode) and fd not in kept:
                _reposition(fd)
            elif not (stat.S_ISDIR(mode) or stat.S_ISCHR(mode) or fd in kept):
                os.dup2(nothing, fd, inheritable=False)
    os.close(nothing)


def _reposition(fd: int) -> None:
    """Give a file that is only read a position that other processes do not move."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    if flags & os.O_ACCMODE != os.O_RDONLY:
        return
    own = os.open(_OPEN / str(fd), flags)
    os.lseek(own, os.lseek(fd, 0, os.SEEK_CUR), os.SEEK_SET)
    os.dup2(own, fd, inheritable=os.get_inheritable(fd))
    os.close(own)


def _keep_memory() -> None:
    """Set what malloc reads from the environment, which it did when this program was started."""
    mallopt = ctypes.CDLL(None).mallopt
    for name, number in _MALLOPT.items():
        mallopt(number, min(int(os.environ[name]), _MOST_INT))
