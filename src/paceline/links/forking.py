"""Fork processes that inherit this process's objects, such as a recipe's data and closures.

    with forked_from_here():                       # forks inherit the objects that exist now
        start(module_command("paceline.x", "y"))   # runs `paceline.x.main` in a fork

A fork of this process is the fork server (see `links.forkserver`):

    a separate thread ──os.fork──► the server, with only this thread ──os.fork──► each process

OpenMP requires that the forking thread has not computed in parallel: otherwise the fork would wait
forever for OpenMP threads that exist only in its parent. The separate thread lives until the end of
the `with` block, because the kernel ends the server together with that thread.

Forks have the objects that existed when the `with` block began, in copy-on-write memory. They do
not inherit sockets or pipes. A file open for reading gets a separate position in each fork.
"""

import fcntl
import gc
import importlib
import os
import signal
import socket
import stat
import sys
import threading
import traceback
import warnings
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from paceline.core.errors import InvalidInput
from paceline.links import processes
from paceline.links.forkserver import (
    OF_WORKERS,
    ForkRequest,
    ForkServer,
    become,
    die_with_parent,
    listen,
)
from paceline.links.memory import keep_memory
from paceline.links.signals import SIGNALS

_OPEN = Path("/proc/self/fd")
_CHECK_S = 60.0  # deadline for the GPU test in a fork (`main`): GPU drivers may be slow


@contextmanager
def forked_from_here() -> Iterator[None]:
    """Let `processes.start` fork this process inside the block; kill the forks at its end.

    Raises InvalidInput if GPUs would not work in a fork, and OSError if no process can start.
    """
    address, listener = listen()
    with _server(listener):
        entry = threading.get_ident(), address
        processes.servers_from_here.append(entry)
        try:
            _check()
            yield
        finally:
            processes.servers_from_here.remove(entry)


@contextmanager
def _server(listener: socket.socket) -> Iterator[None]:
    """Fork the fork server in a separate thread; kill it after the block."""
    _flush()
    parent, forked, is_over = os.getpid(), Future[int](), threading.Event()

    def fork() -> None:
        # Block signals until the fork has removed this program's handlers.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            with warnings.catch_warnings():  # Python warns about forking a process with threads
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
        except OSError as error:
            forked.set_exception(error)
            return
        if pid == 0:
            _serve(listener, parent, before)
        forked.set_result(pid)
        is_over.wait()

    with listener:
        thread = threading.Thread(target=fork, name="paceline forks", daemon=True)
        thread.start()
        pid = forked.result()
    try:
        yield
    finally:
        # Ignore a missing server: the user's program may have reaped all of its children.
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)  # the kernel then ends the server's forks
            os.waitpid(pid, 0)
        is_over.set()
        thread.join()


def _check() -> None:
    from paceline.links.devices import num_gpus  # imports torch, which the command line avoids

    if not num_gpus():  # CPUs always work in a fork
        return
    try:
        code = processes.output(processes.module_command(__name__), _CHECK_S).returncode
    except TimeoutError:
        code = 1
    if code:
        problem = "cannot be trained in forks of this program: it has used a GPU or run backward()"
        hint = "name the recipe as package.module:factory, or run this program under torchrun"
        raise InvalidInput("model", problem, hint=hint)


def main() -> None:
    """Check that this fork can compute on all of its devices; if not, exit with code 1.

    A fork cannot use GPUs if the parent had initialised CUDA. On a machine with GPUs, a fork cannot
    run backward() if the parent had run backward(), which starts a thread per GPU.
    """
    import torch

    from paceline.links.devices import cuda

    if cuda.is_broken_by_fork():
        sys.exit(1)
    torch.ones(1, requires_grad=True).sum().backward()  # RuntimeError if backward cannot run


def _serve(listener: socket.socket, parent: int, mask: Iterable[int]) -> NoReturn:
    """Serve as the fork server until `parent` ends; in a fork, run the requested module.

    Ends the process without running exit handlers. `mask`: signals that stay blocked in forks.
    """
    code: object = 1
    try:
        die_with_parent(parent)
        gc.freeze()  # garbage collection would write to inherited memory, and so copy it
        for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        # Signals that end a run stay blocked until `become` sets their handlers in a fork.
        signal.pthread_sigmask(signal.SIG_SETMASK, {*mask, *SIGNALS})
        _detach_descriptors([listener.fileno()])
        _run_module(ForkServer(listener).serve())
        code = 0
    except SystemExit as error:
        code = error.code or 0
        if not isinstance(code, int):
            sys.stderr.write(f"{code}\n")
    except BaseException:
        traceback.print_exc()
    finally:
        _flush()
        os._exit(code if isinstance(code, int) else 1)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # the stream may be None or a user's object
            stream.flush()


def _run_module(request: ForkRequest) -> None:
    """Turn this fork into the requested process, and run its module."""
    _detach_descriptors(request.received)
    become(request)
    # Replace sys.stdin, sys.stdout and sys.stderr: the user's program may have changed them.
    for fd, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        new = open(fd, mode, buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
        setattr(sys, name, new)
    keep_memory()
    sys.argv = request.command[1 + len(OF_WORKERS) :]
    importlib.import_module(sys.argv[0]).main()


def _detach_descriptors(kept: Collection[int]) -> None:
    """Replace inherited sockets and pipes by /dev/null; keep files and folders.

    Closing a descriptor would free its number for a new file. An inherited object that still uses
    the number could then write to the new file, or close the new file.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in [int(path.name) for path in _OPEN.iterdir()]:
        with suppress(OSError):  # one number is `iterdir`'s own descriptor, closed by now
            mode = os.fstat(fd).st_mode
            if stat.S_ISREG(mode) and fd not in kept:
                _reposition(fd)
            elif not (stat.S_ISDIR(mode) or stat.S_ISCHR(mode) or fd in kept):
                os.dup2(nothing, fd, inheritable=False)
    os.close(nothing)


def _reposition(fd: int) -> None:
    """Reopen a file that is open for reading, so that this fork has its own file position."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    if flags & os.O_ACCMODE != os.O_RDONLY:
        return
    own = os.open(_OPEN / str(fd), flags)
    os.lseek(own, os.lseek(fd, 0, os.SEEK_CUR), os.SEEK_SET)
    os.dup2(own, fd, inheritable=os.get_inheritable(fd))
    os.close(own)
