"""Ranks that live for the whole test session, and run functions of tests.

    def sums(values):                                  # at module level, in the test's file
        total = torch.tensor(values[dist.get_rank()])
        dist.all_reduce(total)
        return total

    def test_sums(pair):
        assert pair(sums, [1.0, 2.0]) == [3.0, 3.0]

Each call has a new store and gloo process group, torchrun's environment variables, and reset random
seeds. Arguments and results are pickled. If a rank raises, hangs or dies, the test fails with the
rank's stack, and the next call starts new ranks. The kernel kills the ranks when the session ends.
"""

import faulthandler
import gc
import importlib.util
import itertools
import os
import pickle
import random
import selectors
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

LOOPBACK = "127.0.0.1"
DEADLINE_S = 45.0  # for a call; shorter than the timeout of a test


@dataclass
class Failure:
    """The exception of a rank, or the reason of its death (`kind` "Died")."""

    kind: str
    text: str
    traceback: str = ""
    kinds: list[str] = field(default_factory=list)  # the exception's classes, its own first
    fields: dict[str, Any] = field(default_factory=dict)


class RankFailed(AssertionError):
    """Some ranks raised, hung or died."""


# --- in the tests' process ---------------------------------------------------------------------


class _Rank:
    """A rank's process, and the connection to it."""

    def __init__(self, number: int, environment: dict[str, str]) -> None:
        from paceline.links.processes import fork, module_command
        from processes import fork_server

        self.number = number
        self.log = tempfile.TemporaryFile("a+b")  # noqa: SIM115 - open while the rank lives
        own_end, its_end = socket.socketpair()
        self.connection = Connection(own_end.detach())
        with its_end, Path(os.devnull).open() as nothing:
            command = module_command(__file__, "3")
            files = enumerate((nothing, self.log, self.log, its_end))
            fds = {number: file.fileno() for number, file in files}
            self.process = fork(command, environment, fds, fork_server())

    def close(self) -> None:
        self.process.close()
        self.connection.close()
        self.log.close()

    def said(self) -> str:
        """Return the end of the rank's output, with the stack of a dead rank."""
        self.log.seek(0)
        text = self.log.read().decode(errors="replace")
        return text.partition("\n\nExtension modules")[0][-6000:]

    def died(self) -> Failure:
        from paceline.links.processes import reason

        self.process.wait(10.0)
        return Failure("Died", f"the rank {reason(self.process.poll())}", self.said(), ["Died"])


class Ranks:
    """A number of ranks, which the first call starts."""

    def __init__(self, size: int, num_gpus: int = 0) -> None:
        from paceline.links.memory import KEEPING_MEMORY
        from processes import ENVIRONMENT, SET_BY_IMPORTS

        self.size = size
        kept = {name: text for name, text in os.environ.items() if name not in SET_BY_IMPORTS}
        self._environment = KEEPING_MEMORY | kept | ENVIRONMENT
        if num_gpus:  # simulated GPUs
            self._environment["PACELINE_SIMULATED_GPUS"] = str(num_gpus)
        self._ranks: list[_Rank] = []

    def __call__(
        self,
        function: Callable[..., Any],
        *args: Any,
        deadline_s: float = DEADLINE_S,
        timeout_s: float = DEADLINE_S,
        errors: bool = False,
        group: bool = True,
        cwd: Path | None = None,
    ) -> list[Any]:
        """Run `function(*args)` on each rank, and return the results.

        `errors`: return a Failure for a rank that raises or dies, instead of raising. `timeout_s`:
        timeout of collectives. `group`: create a process group; if False, the function does. `cwd`:
        working directory. The environment has this process's PACELINE_* variables, which
        failpoints set.
        """
        if not self._ranks:
            self._ranks = [_Rank(number, self._environment) for number in range(self.size)]
        own = {name: text for name, text in os.environ.items() if name.startswith("PACELINE_")}
        store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
        request = {
            "file": function.__code__.co_filename,
            "function": function.__qualname__,
            "args": args,
            "deadline_s": deadline_s,
            "timeout_s": timeout_s,
            "group": group,
            "cwd": str(cwd or ""),
            "environment": own,
        }
        is_sound = False
        try:
            results = self._carried_out(request, store.port)
            failed = [one for one in results if isinstance(one, Failure)]
            if failed and not errors:
                raise RankFailed("\n".join(_told(results)))
            is_sound = not failed
        finally:
            if not is_sound:
                self.close()
            del store
        return results

    def _carried_out(self, request: dict[str, Any], port: int) -> list[Any]:
        for rank in self._ranks:
            environment = request["environment"] | _place(rank.number, self.size, port)
            _send(rank.connection, request | {"environment": environment})
        results: dict[int, Any] = {}
        until = time.monotonic() + request["deadline_s"]
        with selectors.DefaultSelector() as selector:
            for rank in self._ranks:
                selector.register(rank.connection, selectors.EVENT_READ, rank)
            while selector.get_map():
                ready = selector.select(max(0.0, until - time.monotonic()))
                if not ready:
                    raise RankFailed(self._stuck(request, results))
                for key, _ in ready:
                    selector.unregister(key.fileobj)
                    rank = key.data
                    answer = _receive(rank.connection)
                    results[rank.number] = rank.died() if answer is None else _read(answer)
        return [results[number] for number in range(self.size)]

    def _stuck(self, request: dict[str, Any], results: dict[int, Any]) -> str:
        """Abort the ranks that have not answered, and return their stacks."""
        lines = [f"{request['function']}: not done after {request['deadline_s']:g} s"]
        for rank in self._ranks:
            if rank.number in results:
                lines += _told([results[rank.number]], rank.number)
            else:
                rank.process.send(signal.SIGABRT)
                rank.process.wait(10.0)
                lines.append(f"rank {rank.number} hangs:\n{rank.said()}")
        return "\n".join(lines)

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()
        self._ranks = []


def _told(results: list[Any], first: int = 0) -> list[str]:
    said = [
        f"{one.text}\n{one.traceback}" if isinstance(one, Failure) else "done" for one in results
    ]
    return [f"rank {number}: {text}" for number, text in enumerate(said, first)]


def _read(answer: dict[str, Any]) -> Any:
    return Failure(**answer["failure"]) if "failure" in answer else answer["result"]


def _place(rank: int, size: int, port: int) -> dict[str, str]:
    """Return the environment variables that torchrun sets for a rank."""
    place = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "GLOO_SOCKET_IFNAME": "lo",
    }
    return {name: str(value) for name, value in place.items()}


# --- on both sides -----------------------------------------------------------------------------


def _send(connection: Connection, message: dict[str, Any]) -> None:
    with suppress(BrokenPipeError):  # the other side has died; reading will report it
        connection.send_bytes(pickle.dumps(message))


def _receive(connection: Connection) -> dict[str, Any] | None:
    """Return the next message; None if the other side has closed the connection."""
    try:
        message: dict[str, Any] = pickle.loads(connection.recv_bytes())
        return message
    except (EOFError, ConnectionResetError):
        return None


# --- on a rank ---------------------------------------------------------------------------------


def serve(connection: Connection) -> None:
    """Run requested functions until the other side closes the connection."""
    signals = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    while (request := _receive(connection)) is not None:
        os.ftruncate(2, 0)
        with _restored(), _as_asked(request):
            answer = _answer(request)
        for number, handler in signals.items():
            signal.signal(number, handler)
        _send(connection, answer)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    try:
        if request["group"]:
            store, _, _ = next(rendezvous("env://"))
            joined(store, request["timeout_s"])
        function = _function(Path(request["file"]), request["function"])
        result = {"result": function(*request["args"])}
        pickle.dumps(result)  # raises an error if the result cannot be sent
        return result
    except BaseException as error:
        return {"failure": _failure(error)}
    finally:
        leave()


def joined(store: Store, timeout_s: float) -> None:
    """Create the process group; ranks may call this at different times.

    Without a barrier, a fast rank can leave the group while another rank still connects to it. Then
    that rank fails ("connectFullMesh"). So all ranks wait for each other before and after.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    timeout = timedelta(seconds=timeout_s)
    _await_all(store, "here", rank, size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    _await_all(store, "joined", rank, size)


def _await_all(store: Store, word: str, rank: int, size: int) -> None:
    store.set(f"{word}/{rank}", "")
    store.wait([f"{word}/{other}" for other in range(size)], timedelta(seconds=DEADLINE_S))


def _failure(error: BaseException) -> dict[str, Any]:
    names = ("field", "problem", "got", "hint", "code", "rank")
    plain = (str, int, float, bool, list, type(None))
    fields = {name: getattr(error, name) for name in names if hasattr(error, name)}
    fields = {name: one if isinstance(one, plain) else str(one) for name, one in fields.items()}
    return {
        "kind": type(error).__name__,
        "text": str(error) or type(error).__name__,
        "traceback": "".join(traceback.format_exception(error)),
        "kinds": [kind.__name__ for kind in type(error).__mro__],
        "fields": fields,
    }


_modules: dict[Path, Any] = {}
_groups: list[Any] = []  # a gloo thread's callback must not release the last reference


def _function(file: Path, qualified: str) -> Callable[..., Any]:
    """Return the function of this name in a file, and import the file once."""
    found: Any = _modules.get(file, sys.modules.get(file.stem))
    if getattr(found, "__file__", None) != str(file):
        if str(file.parent) not in sys.path:
            sys.path.append(str(file.parent))
        name = file.stem if found is None else str(file)
        spec: Any = importlib.util.spec_from_file_location(name, file)
        found = _modules[file] = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
    for name in qualified.split("."):
        found = getattr(found, name)
    return found


def leave() -> None:
    """Leave the process group, so that waiting peers fail."""
    if dist.is_initialized():
        _groups[:] = [*_groups[-1:], dist.group.WORLD]
    gc.collect()
    gc.freeze()  # later collections skip the remaining objects
    if dist.is_initialized():
        with suppress(RuntimeError):
            dist.destroy_process_group()


@contextmanager
def _as_asked(request: dict[str, Any]) -> Iterator[None]:
    environment, folder = dict(os.environ), Path.cwd()
    os.environ.update(request["environment"])
    if request["cwd"]:
        os.chdir(request["cwd"])
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)


@contextmanager
def _restored() -> Iterator[None]:
    """Start with the state of a new process, and restore global settings."""
    from paceline.links import failpoints, rendezvous

    failpoints._visits.clear()
    rendezvous._meetings = itertools.count()
    random.seed(0)
    torch.manual_seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    dtype, arguments, path = torch.get_default_dtype(), sys.argv[:], sys.path[:]
    try:
        with warnings.catch_warnings():
            yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(True)
        torch.set_num_threads(1)
        sys.argv[:], sys.path[:] = arguments, path


def main() -> None:
    from leading import handle_as_python
    from paceline.links.devices import gpus
    from simulated_gpu import instead as instead

    handle_as_python()
    faulthandler.enable()  # SIGABRT prints the stack of a hanging rank
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    sys.path[0] = str(Path(__file__).parent)  # do not import this module twice
    sys.modules["pair"] = sys.modules["__main__"]
    gpus()  # autograd only knows devices that exist before the first backward pass
    serve(Connection(int(sys.argv[1])))
    os._exit(0)  # gloo threads may still wait for failed ranks


if __name__ == "__main__":
    main()
