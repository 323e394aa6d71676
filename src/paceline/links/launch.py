"""Start the workers of this machine, and see to it that none outlives the run.

The environment that a worker finds is torchrun's, so that the same worker runs under either.
"""

import os
import selectors
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from paceline.core.errors import InvalidInput, PacelineError, WorkerLost, WorkersFailed
from paceline.links.group import failure

# A step frees what the next one takes again: if it is given back, each page costs a fault.
KEEPING_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(2**32), "MALLOC_MMAP_THRESHOLD_": str(2**30)}
_LOOPBACK = "127.0.0.1"
_GRACE_S = 5.0  # for the others to notice by themselves that one is gone, and to say so
_TERMINATION_S = 2.0


@dataclass
class _Worker:
    rank: int
    process: subprocess.Popen[bytes]
    pidfd: int


def launch(command: Sequence[str], num_workers: int, port: int = 0) -> None:
    """Run `command` as `num_workers` local workers and wait until all have ended well.

    They meet at `port` of the loopback address; 0 takes a free one. Raises InvalidInput if the port
    is in use, WorkerLost if a worker was killed, WorkersFailed if workers ended with an error. No
    worker is left when it returns or raises, nor when this process is killed.
    """
    listener = _listen(port)
    port = listener.getsockname()[1]
    # The store takes the listening socket over: the port is ours from the first moment, and bound
    # to one address, which a store that opens its own socket would not do.
    store = dist.TCPStore(  # type: ignore[attr-defined] # exported, but not declared
        _LOOPBACK,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=60),
        master_listen_fd=listener.detach(),
    )
    workers: list[_Worker] = []
    # Only the main thread may handle signals, and gets them.
    is_main = threading.current_thread() is threading.main_thread()
    previous = signal.signal(signal.SIGTERM, _exit_on_signal) if is_main else None
    try:
        for rank in range(num_workers):
            workers.append(_start(command, rank, num_workers, port))  # noqa: PERF401 - one may fail
        failed = _wait(workers)
        if failed:
            raise _failure(failed, failure(store))
    finally:
        _end(workers)
        if is_main:
            signal.signal(signal.SIGTERM, previous)
        del store


def _exit_on_signal(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def _listen(port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((_LOOPBACK, port))
        listener.listen()
    except (OSError, OverflowError) as error:
        listener.close()
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InvalidInput(f"port: cannot listen on {_LOOPBACK}:{port}: {reason}") from None
    return listener


def _start(command: Sequence[str], rank: int, num_workers: int, port: int) -> _Worker:
    place = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": num_workers,
        "LOCAL_WORLD_SIZE": num_workers,
        "MASTER_ADDR": _LOOPBACK,
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,  # the launcher keeps the store, not rank 0
        "PACELINE_LAUNCHER": os.getpid(),
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }
    environment = KEEPING_MEMORY | os.environ | {name: str(value) for name, value in place.items()}
    process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)  # noqa: S603
    return _Worker(rank, process, os.pidfd_open(process.pid))


def _wait(workers: Sequence[_Worker]) -> list[_Worker]:
    """Return those that ended badly; when the first has, the others get time to follow."""
    running = {worker.pidfd: worker for worker in workers}
    failed: list[_Worker] = []
    deadline: float | None = None
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            selector.register(worker.pidfd, selectors.EVENT_READ)
        while running:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                break
            for key, _ in selector.select(left):
                worker = running.pop(key.fd)
                selector.unregister(key.fd)
                if worker.process.wait() != 0:
                    failed.append(worker)
                    deadline = deadline or time.monotonic() + _GRACE_S
    return failed


def _failure(failed: Sequence[_Worker], reason: str | None) -> PacelineError:
    killed = [worker for worker in failed if worker.process.returncode < 0]
    if not killed:
        return WorkersFailed(max(worker.process.returncode for worker in failed), reason)
    names = [
        f"worker {worker.rank} (process {worker.process.pid}) was ended by "
        f"{signal.Signals(-worker.process.returncode).name}"
        for worker in killed
    ]
    return WorkerLost(f"{'; '.join(names)}: the run is stopped")


def _end(workers: Sequence[_Worker]) -> None:
    running = [worker for worker in workers if worker.process.poll() is None]
    for worker in running:
        worker.process.terminate()
    deadline = time.monotonic() + _TERMINATION_S
    for worker in running:
        try:
            worker.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.process.kill()
            worker.process.wait()
    for worker in workers:
        os.close(worker.pidfd)
