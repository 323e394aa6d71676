"""Train elastically with torchft: start workers and their lighthouse, and restart lost workers.

    launcher   starts the lighthouse and the workers; restarts a lost worker, which then rejoins
    worker     starts a TCPStore and a torchft manager, and trains

The lighthouse is torchft's server that knows which workers take part. Each worker is a process that
runs `main` with the arguments REQUEST, NUMBER and LIGHTHOUSE (the lighthouse's URL).
"""

import logging
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from paceline.core.errors import InvalidInput, WorkerLost, WorkersFailed
from paceline.core.settings import TrainSettings
from paceline.exchange.session import ElasticWorker
from paceline.links.group import Group
from paceline.links.launch import LOOPBACK, store_on
from paceline.links.processes import Process, end, module_command, reason, start
from paceline.links.signals import handled_by
from paceline.runs.rank import as_rank, leave
from paceline.runs.restarts import RunRequest
from paceline.runs.session import go_through

logger = logging.getLogger(__name__)
_MOST_RESTARTS = 3  # maximum restarts of a worker; counted anew if it has run longer than _SOON_S
_SOON_S = 30.0
_POLL_S = 0.1
_TICK_MS, _HEARTBEAT_MS = 100, 5000


def carry_out(request: RunRequest) -> None:
    """Train with elastic workers, and wait until this machine's workers have ended.

    Raises InvalidInput if torchft is not installed or a worker number is too large, WorkerLost if a
    worker is lost repeatedly, and WorkersFailed if a worker has reported an error.
    """
    settings = request.settings
    assert isinstance(settings, TrainSettings)  # only training can be elastic
    count = int(settings.workers)
    numbers = settings.worker_ids or tuple(range(count))
    for number in numbers:
        if number >= count:
            problem = f"must be less than {count}, the number of workers"
            raise InvalidInput("worker_ids", problem, got=number)
    if settings.resume is not None:
        raise InvalidInput("resume", "cannot be combined with --elastic")
    with _lighthouse(settings) as address:
        pool = _Workers(request, numbers, address)
        try:
            pool.wait()
        finally:
            pool.close()


class _Workers:
    """The worker processes of this machine; a worker that a signal kills is restarted."""

    def __init__(self, request: RunRequest, numbers: tuple[int, ...], lighthouse: str) -> None:
        self._request, self._numbers, self._lighthouse = request, numbers, lighthouse
        self._running = {number: self._started(number) for number in numbers}
        self._began_s = dict.fromkeys(numbers, time.monotonic())
        self._restarts = dict.fromkeys(numbers, 0)
        self._signalled: int | None = None

    def _started(self, number: int) -> Process:
        place = self._numbers.index(number)
        environment = {
            "RANK": str(number),  # only for logs: in torch each worker is rank 0 of its own group
            "WORLD_SIZE": "1",
            "LOCAL_RANK": str(place),
            "LOCAL_WORLD_SIZE": str(len(self._numbers)),
            "RUST_LOG": os.environ.get("RUST_LOG", "error"),
        }
        if urlsplit(self._lighthouse).hostname == LOOPBACK:
            environment["GLOO_SOCKET_IFNAME"] = "lo"
        arguments = self._request.model_dump_json(), str(number), self._lighthouse
        return start(module_command("paceline.runs.elastic", *arguments), environment=environment)

    def wait(self) -> None:
        """Wait until all workers have ended, and restart every worker that a signal has killed."""
        with handled_by(self._pass_on):
            while self._running:
                time.sleep(_POLL_S)
                for number, process in list(self._running.items()):
                    if (code := process.poll()) is not None:
                        self._ended(number, code)
        if self._signalled is not None:
            raise WorkersFailed(128 + self._signalled)

    def _ended(self, number: int, code: int) -> None:
        self._running.pop(number).close()
        if code == 0 or self._signalled is not None:
            return
        if code > 0:  # the worker has printed the error itself
            raise WorkersFailed(code)
        if time.monotonic() - self._began_s[number] > _SOON_S:
            self._restarts[number] = 0
        self._restarts[number] += 1
        why = f"worker {number} {reason(code)}"
        if self._restarts[number] > _MOST_RESTARTS:
            raise WorkerLost(f"{why}, {_MOST_RESTARTS + 1} times in a row")
        logger.warning("%s; restarting it", why)
        self._began_s[number] = time.monotonic()
        self._running[number] = self._started(number)

    def _pass_on(self, number: int, _: object) -> None:
        self._signalled = self._signalled or number
        for process in self._running.values():
            process.send(number)

    def close(self) -> None:
        """Terminate the workers that still run."""
        end(list(self._running.values()))


@contextmanager
def _lighthouse(settings: TrainSettings) -> Iterator[str]:
    """Yield the URL of torchft's lighthouse: the one in the settings, or one started here."""
    if settings.lighthouse is not None:
        yield settings.lighthouse
        return
    os.environ.setdefault("RUST_LOG", "error")  # otherwise the lighthouse logs every quorum
    try:
        from torchft.coordination import LighthouseServer
    except ImportError as error:
        raise InvalidInput(
            "elastic", f"requires torchft ({error})", hint="pip install 'paceline[elastic]'"
        ) from None
    server = LighthouseServer(
        bind=f"{LOOPBACK}:0",
        min_replicas=1,
        join_timeout_ms=round(1000 * settings.deadline_s),
        quorum_tick_ms=_TICK_MS,
        heartbeat_timeout_ms=_HEARTBEAT_MS,
    )
    try:
        yield f"http://{LOOPBACK}:{server.address().rpartition(':')[2]}"
    finally:
        server.shutdown()


@contextmanager
def _managed(settings: TrainSettings, number: int, lighthouse: str) -> Iterator[Any]:
    """Yield a worker's torchft manager; each worker has a TCPStore and is one replica group."""
    from torchft import Manager, ProcessGroupGloo

    host = _address_towards(lighthouse)
    store = store_on(host)
    deadline = timedelta(seconds=settings.deadline_s)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=deadline),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        use_async_quorum=False,
        timeout=deadline,
        quorum_timeout=timedelta(seconds=settings.wait_s),
        replica_id=f"worker{number}",
        hostname=host,
        store_addr=host,
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
    )
    try:
        yield manager
    finally:
        manager.shutdown(wait=False)
        del store


def _address_towards(lighthouse: str) -> str:
    """Return the local IP address with which this machine reaches the lighthouse."""
    parts = urlsplit(lighthouse)
    if parts.hostname is None or parts.port is None:
        raise InvalidInput("lighthouse", "must be a URL with a host and a port", got=lighthouse)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # A UDP connect sends no packet, but selects the local address.
            probe.connect((parts.hostname, parts.port))
        except OSError as error:
            raise InvalidInput("lighthouse", f"cannot be resolved: {error}") from None
        address: str = probe.getsockname()[0]
    return address


def _go_through(request: RunRequest, number: int, lighthouse: str, group: Group) -> None:
    settings = request.settings
    assert isinstance(settings, TrainSettings)
    alone = Group.alone(group.device, group.deadline_s)
    with _managed(settings, number, lighthouse) as manager:
        go_through(request, alone, ElasticWorker(number, int(settings.workers), manager))


def main() -> None:
    """Run one elastic worker; `sys.argv` contains REQUEST (JSON), NUMBER and LIGHTHOUSE (a URL)."""
    # Hide a warning about NCCL that torchft repeats whenever workers join or leave.
    logging.getLogger("torchft").setLevel(logging.ERROR)
    request, number, lighthouse = sys.argv[1:]
    asked = RunRequest.model_validate_json(request)
    go = partial(_go_through, asked, int(number), lighthouse)
    leave(as_rank(go, asked.settings.deadline_s))
