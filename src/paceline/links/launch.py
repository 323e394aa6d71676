"""Start this machine's workers with torchrun's environment; no worker outlives the run."""

import socket
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from signal import SIGTERM
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from paceline.core.errors import PacelineError, WorkerLost, WorkersFailed
from paceline.links.failpoints import reach
from paceline.links.failures import FAILURE, SIGNALLED, STOPPED, publish, published
from paceline.links.interruption import Interruption, is_agreed
from paceline.links.processes import Process, end, reason, start, wait
from paceline.links.signals import EXIT_CODES, blocked, handled_by, participle

LOOPBACK = "127.0.0.1"
_GRACE_S = 5.0  # time in which the other workers notice a lost worker and report it


def launch(command: Sequence[str], num_workers: int) -> None:
    """Run a `module_command` as `num_workers` local workers, and wait until all succeed.

    The workers meet at a free port of the loopback address. The first SIGINT or SIGTERM is passed
    on to the workers. No worker outlives this function, even if this process is killed. Raises
    WorkerLost if a worker was killed, and WorkersFailed if workers ended with an error or after a
    signal.
    """
    store = store_on(LOOPBACK)
    workers: list[Process] = []
    try:
        passed = _PassedOn(workers, store)
        with handled_by(passed) as passed.before:
            # Block signals while workers start: a signal that arrives before a worker is in the
            # list would not be passed on to that worker.
            with blocked():
                for rank in range(num_workers):
                    environment = _environment(rank, num_workers, store.port)
                    worker = start(command, environment=environment)
                    reach("launch.started", worker=rank)
                    workers.append(worker)
            failed = wait(workers, _GRACE_S, partial(_is_saving, store, workers))
        codes = [process.poll() or 0 for process in failed]
        if failed and (passed.number is not None or set(codes) & set(EXIT_CODES)):
            raise _stop(workers, failed, passed.number, published(store, STOPPED))
        if failed:
            raise _failure(workers, failed, published(store, FAILURE))
    finally:
        publish(store, SIGNALLED, int(SIGTERM))
        end(workers)
        del store


def store_on(host: str) -> Any:
    """Return a TCPStore at a free port of `host`; by default, a store listens on all interfaces."""
    listener = socket.create_server((host, 0))
    return dist.TCPStore(  # type: ignore[attr-defined] # exported, but not declared
        host,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=60),
        master_listen_fd=listener.detach(),
    )


def _environment(rank: int, num_workers: int, port: int) -> dict[str, str]:
    """Return the environment variables that torchrun would set for a worker."""
    place = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": num_workers,
        "LOCAL_WORLD_SIZE": num_workers,
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,  # the launcher keeps the store, not rank 0
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }
    return {name: str(value) for name, value in place.items()}


class _PassedOn(Interruption):
    """Passes the first signal on to the workers, because a scheduler signals only this process."""

    def __init__(self, workers: Sequence[Process], store: Store) -> None:
        super().__init__()
        self._workers, self._store = workers, store

    def __call__(self, number: int, frame: FrameType | None) -> None:
        super().__call__(number, frame)
        publish(self._store, SIGNALLED, number)
        for worker in self._workers:
            worker.send(number)


def _is_saving(store: Store, workers: Sequence[Process], code: int) -> bool:
    """Return True if the workers will save their state, having agreed on a last step.

    Otherwise, send all workers the signal that ended one of them with exit code `code`.
    """
    if is_agreed(store):
        return True
    for worker in workers:
        worker.send(code - 128)
    return False


def _stop(
    workers: Sequence[Process], failed: Sequence[Process], passed: int | None, said: str | None
) -> WorkersFailed:
    """Return the error of a run that a signal ended.

    `failed`: workers that ended with a code other than 0. `passed`: the signal passed on to all
    workers, if any. `said`: the line that rank 0 printed about the stop, if any.
    """
    if said is not None:
        return WorkersFailed(128 + passed if passed else failed[0].poll() or 0, said)
    if passed is None:
        first = next(one for one in failed if one.poll() in EXIT_CODES)
        code = first.poll() or 0
        why = f"by a signal to worker {workers.index(first)} (process {first.pid})"
        return WorkersFailed(code, f"{participle(code - 128)} {why}", is_said=False)
    lost = [one for one in failed if one.poll() not in EXIT_CODES]
    why = f"; {_failure(workers, lost, None)}" if lost else ""
    return WorkersFailed(128 + passed, participle(passed) + why, is_said=False)


def _failure(
    workers: Sequence[Process], failed: Sequence[Process], said: str | None
) -> PacelineError:
    codes = {process: process.poll() or 0 for process in failed}
    names = [
        f"worker {workers.index(process)} (process {process.pid}) {reason(code)}"
        for process, code in codes.items()
        if code < 0
    ]
    if not names:
        return WorkersFailed(max(codes.values()), said)
    return WorkerLost(f"{'; '.join(names)}: the run is stopped")
