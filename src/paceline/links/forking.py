"""Fork processes from this one, so that they have its objects: a recipe's data and its closures.

    with forked_from_here():                       # from now on
        start(module_command("paceline.x", "y"))   # has `paceline.x.main` run in a fork

A thread of its own does the forking, and nothing else:

    any thread ──► thread that forks ──os.fork──► the same thread, alone, in the new process

For OpenMP a process may be forked only by a thread that has not computed in parallel: the others it
would wait for in the fork for ever. In the fork that thread is the main one, which gets signals.
The kernel ends a fork together with the thread that made it, so the thread stays until the end.

Memory is shared until it is written to. Descriptors are not: sockets, pipes and what else belongs
to this process are taken away from a fork, and a file that is only read gets a position of its own.
"""

import ctypes
import fcntl
import gc
import importlib
import io
import os
import select
import signal
import stat
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import NoReturn, TextIO

from paceline.core.errors import InvalidInput
from paceline.links.failpoints import reach
from paceline.links.forkserver import ForkRequest, become
from paceline.links.signals import SIGNALS
from paceline.native import die_with_parent

_OPEN = Path("/proc/self/fd")
_MALLOPT = {"MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_MMAP_THRESHOLD_": -3}  # see mallopt(3)
_MOST_INT = 2**31 - 1
_READY_S = 60.0
_CHECK_S = 60.0  # for a GPU's driver on a busy machine


class Fork:
    """A process that was forked from this one: as a subprocess.Popen in what is asked of it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs."""
        return self._wait(os.WNOHANG)

    def wait(self) -> int | None:
        """Wait for its end, and return the exit code."""
        return self._wait(0)

    def send_signal(self, number: int) -> None:
        """Send a signal, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            try:
                found, status = os.waitpid(self.pid, options)
            except ChildProcessError:  # the program waits for all its children: the code is lost
                found, status = self.pid, 0
            if found and self.returncode is None:  # a handler of a signal may have been faster
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class _ForkingThread:
    """The thread that forks for this process."""

    def __init__(self) -> None:
        self.of = os.getpid()
        self._requests: SimpleQueue[tuple[Callable[[], None], SimpleQueue[int | OSError]] | None]
        self._requests = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="paceline forks", daemon=True)
        self._thread.start()

    def fork(self, run: Callable[[], None]) -> Fork:
        """Fork a process that runs this, and then ends. Raises OSError if there can be no more."""
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # there may be none, or one of the user's
                stream.flush()
        answer: SimpleQueue[int | OSError] = SimpleQueue()
        self._requests.put((run, answer))
        found = answer.get()
        if isinstance(found, OSError):
            raise found
        return Fork(found)

    def close(self) -> None:
        """End the thread, and with it what it has forked."""
        self._requests.put(None)
        self._thread.join()

    def _serve(self) -> None:
        # A signal waits until a fork has let go of the handlers of this program.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while (request := self._requests.get()) is not None:
            run, answer = request
            try:
                answer.put(self._fork(run, before))
            except OSError as error:
                answer.put(error)

    def _fork(self, run: Callable[[], None], mask: Iterable[int]) -> int:
        """Fork, and return the number of the new process once it would end with this thread."""
        readable, writable = os.pipe()
        try:
            with warnings.catch_warnings():  # Python warns of forks of processes with threads
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
            if pid == 0:
                _run(run, self.of, mask, writable)
            os.close(writable)
            writable = -1
            # It is so also if the process has ended, but not if a hook of the program hangs there.
            if not _is_readable(readable, _READY_S):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                raise OSError(f"a process that was forked was not ready within {_READY_S:g} s")
            return pid
        finally:
            os.close(readable)
            if writable >= 0:
                os.close(writable)


class _Forking:
    """Whether processes are forked from here, how many have asked for it, and the thread."""

    def __init__(self) -> None:
        self.num_users = 0
        self.lock = threading.Lock()
        self.thread: _ForkingThread | None = None


_forking = _Forking()


@contextmanager
def forked_from_here() -> Iterator[None]:
    """Have processes of this package forked from this one meanwhile.

    None of them outlives it. Raises InvalidInput if what they compute with does not survive a fork.
    """
    with _forking.lock:
        _forking.num_users += 1
    try:
        _check()
        yield
    finally:
        with _forking.lock:
            _forking.num_users -= 1
            if not _forking.num_users and _forking.thread is not None:
                thread, _forking.thread = _forking.thread, None
                thread.close()


def is_forking() -> bool:
    """Return True if processes of this package are forked from this one."""
    return _forking.num_users > 0


def fork(
    module: str, arguments: list[str], environment: Mapping[str, str], fds: Mapping[int, int]
) -> Fork:
    """Fork a process that runs a module's `main`.

    `fds` are descriptors of this process under the numbers that they shall have in the other.
    Raises OSError if there can be no more processes.
    """
    cores = sorted(os.sched_getaffinity(0))
    command, folder = [module, *arguments], str(Path.cwd())
    own = list(fds.values())
    request = ForkRequest(command, dict(environment), folder, cores, list(fds), own)
    return _thread().fork(partial(_run_module, request))


def _thread() -> _ForkingThread:
    # A fork that forks again has the object, but not the thread.
    if _forking.thread is None or _forking.thread.of != os.getpid():
        _forking.thread = _ForkingThread()
    return _forking.thread


def _check() -> None:
    from paceline.links.devices import num_gpus  # imports torch, which the command line does later

    if not num_gpus():  # cores alone can always be computed with
        return
    tried = _thread().fork(_exit_unless_able)
    pidfd = os.pidfd_open(tried.pid)
    has_ended = _is_readable(pidfd, _CHECK_S)
    os.close(pidfd)
    tried.send_signal(signal.SIGKILL)
    if tried.wait() or not has_ended:
        raise InvalidInput(
            "model",
            "a recipe's workers are forked from this program, which has used a GPU, or gone "
            "through a backward pass where there is one: they could not do it again",
            hint="name the recipe as package.module:factory, or run this program under torchrun",
        )


def _is_readable(fd: int, within_s: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(within_s * 1e3))


def _exit_unless_able() -> None:
    from paceline.links.devices import can_compute_in_fork

    if not can_compute_in_fork():
        sys.exit(1)


def _run(run: Callable[[], None], parent: int, mask: Iterable[int], ready: int) -> NoReturn:
    """Run this in a fork to its end, as Python runs a program, and end the process.

    `mask`: the signals that are blocked. `ready` is written to when it handles the others.
    Nothing that the forked program would do at its end is done, and nothing of it is freed.
    """
    code: object = 1
    try:
        reach("fork.began")
        die_with_parent(parent)
        gc.freeze()  # a collection would write to, and so copy, all of it
        for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        # Those that end a run wait until this is one of its processes.
        signal.pthread_sigmask(signal.SIG_SETMASK, {*mask, *SIGNALS})
        os.write(ready, b"!")
        run()
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
    request.received = [os.dup(fd) for fd in request.received]
    _let_go(request.received)
    become(request)
    sys.stdin, sys.stdout, sys.stderr = _stream(0, "r"), _stream(1, "w"), _stream(2, "w")
    _keep_memory()
    sys.argv = request.command
    importlib.import_module(request.command[0]).main()


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
