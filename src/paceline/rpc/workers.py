"""Connect, start and end the worker processes of a hub.

The hub starts a process for each device of its machine. The process runs a module whose `main`
calls `run_as_process`. On other machines, the user starts `paceline worker`.
"""

import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from os import sched_getaffinity
from pathlib import Path
from typing import TypeVar

from paceline.core.error_lines import error_line, exit_code
from paceline.core.errors import InvalidInput, PacelineError
from paceline.core.reading import read_json
from paceline.links import processes
from paceline.links.cores import physical_cores
from paceline.links.worker_signals import WorkerSignals, report_signals
from paceline.rpc.client import Client, HubRestarted
from paceline.rpc.connecting import ConnectingWorkers
from paceline.rpc.frames import Message
from paceline.rpc.keys import load_worker_keys

logger = logging.getLogger("paceline.worker")  # __name__ may be __main__ in workers
AGAIN, REFUSED, FAILED = "again", "refused", "failed"
_Reply = TypeVar("_Reply")


class WorkerRefused(InvalidInput):
    """Raised if the hub refuses this worker; the text has the reason."""


def check_reply(reply: Message, hub: str = "") -> Message:
    """Return a hub's reply; raises HubRestarted for AGAIN, and WorkerRefused for REFUSED.

    `hub`: the text before the reason in WorkerRefused, such as "the parent hub: ".
    """
    if reply.topic == AGAIN:
        raise HubRestarted("the hub requires this worker to repeat its step")
    if reply.topic == REFUSED:
        raise WorkerRefused.of(hub + bytes(reply.parts[0]).decode(errors="replace"))
    return reply


def refusal(why: str) -> Message:
    """Return the reply that refuses a worker; `why`: the reason, for the worker's user."""
    return Message(REFUSED, parts=(why.encode(),))


def retry_after_restart(ask: Callable[[], _Reply]) -> _Reply:
    """Return the result of `ask`; call `ask` again if the hub was restarted meanwhile."""
    while True:
        try:
            return ask()
        except HubRestarted:
            logger.info("the hub was restarted: sending the requests again")


@contextmanager
def connected(settings: ConnectingWorkers, folder: Path | None) -> Iterator[dict[int, Client]]:
    """Connect workers to the hub; yield the clients by worker number.

    `folder`: the folder of keys. Reports errors in the `with` block to the hub.
    """
    keys = None if folder is None else load_worker_keys(folder)
    clients: dict[int, Client] = {}
    with ExitStack() as stack:
        for worker in settings.numbers:
            place = settings.connect, settings.run_name, worker
            client = Client(*place, keys=keys, deadline_s=settings.deadline_s)
            clients[worker] = stack.enter_context(closing(client))
        try:
            yield clients
        except WorkerRefused:
            raise
        except Exception as error:
            by_input = int(isinstance(error, InvalidInput))
            text = error_line(error, listed(settings.numbers)).encode()
            message = Message(FAILED, by_input, parts=(text,))
            for client in clients.values():
                with suppress(PacelineError):  # raised if the hub is gone
                    client.request(message).result()
            raise


def difference(here: str, there: str) -> str | None:
    """Return a text on the first difference between two JSON mappings; None if they agree."""
    own, other = json.loads(here), read_json(there.encode(), "run")
    if not isinstance(other, dict):
        raise InvalidInput("run", "must be a mapping")
    for part, value in own.items():
        found = other.get(part)
        if isinstance(value, dict) and isinstance(found, dict):
            for name in value | found:
                if value.get(name) != found.get(name):
                    return f"{part}, {name}: {found.get(name)} instead of {value.get(name)}"
        elif value != found:
            return f"{part}: {found} instead of {value}"
    return None


def listed(workers: Sequence[int]) -> str:
    """Join worker numbers with commas, such as "0,1"."""
    return ",".join(map(str, workers))


_Settings = TypeVar("_Settings", bound=ConnectingWorkers)


def run_as_process(
    work: Callable[[_Settings, Mapping[int, Client]], object], kind: type[_Settings]
) -> None:
    """Parse JSON settings in `sys.argv[1]` as `kind`, connect the workers, and run `work`."""
    report_signals()
    settings = kind.model_validate_json(sys.argv[1])
    shown = logging.StreamHandler()
    shown.setFormatter(logging.Formatter("paceline worker: %(message)s"))
    package = logging.getLogger("paceline")
    package.addHandler(shown)
    package.setLevel(logging.INFO)
    try:
        with connected(settings, settings.keys) as clients:
            work(settings, clients)
    except Exception as error:
        if not isinstance(error, WorkerRefused):
            numbers = listed(settings.numbers)
            logger.error("%s: %s", numbers, error_line(error, numbers))
        sys.exit(exit_code(error))


class WorkerPool:
    """Starts a worker process that runs `module` for each item of `settings`."""

    def __init__(self, module: str, settings: Sequence[ConnectingWorkers]) -> None:
        self._processes: dict[processes.Process, tuple[int, ...]] = {}  # worker numbers by process
        self._signals = WorkerSignals()
        try:
            for one in settings:
                process = self._signals.start(module, one.model_dump_json())
                self._processes[process] = one.numbers
        except BaseException:
            self.close()
            raise

    def poll(self) -> list[tuple[int, str]]:
        """List failed workers with reasons; stop the run if any worker got a signal."""
        found: list[tuple[int, str]] = []
        names = {one: f"worker {listed(numbers)}" for one, numbers in self._processes.items()}
        self._signals.poll({process.pid: name for process, name in names.items()})
        for process, name in names.items():
            if process.poll():
                self._signals.ended(process, name)
                ended = f"(process {process.pid}) {processes.reason(process.poll())}"
                found += [(worker, ended) for worker in self._processes.pop(process)]
                process.close()
        return found

    def close(self, wait_s: float = 0.0) -> None:
        """Wait at most `wait_s` for the processes to exit, then end the remaining ones."""
        running = list(self._processes)
        self._processes.clear()
        processes.end(running, wait_s=wait_s, termination_s=0.0)
        self._signals.close()


def num_threads(num_devices: int) -> int:
    """Divide this machine's cores among a hub and one worker process per device.

    Returns the number of threads of each process.
    """
    return max(1, len(physical_cores(sched_getaffinity(0))) // (num_devices + 1))
