"""Start the workers of this machine, and see to it that none outlives the run.

The environment that a worker finds is torchrun's, so that the same worker runs under either.
"""

import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from paceline.core.errors import InvalidInput, PacelineError, WorkerLost, WorkersFailed
from paceline.links.group import failure
from paceline.links.processes import TERMINATION_S, Process, end, reason, start, wait

_LOOPBACK = "127.0.0.1"
_GRACE_S = 5.0  # for the others to notice by themselves that one is gone, and to say so


def launch(command: Sequence[str], num_workers: int, port: int = 0) -> None:
    """Run `command` as `num_workers` local workers and wait until all have ended well.

    They meet at `port` of the loopback address; 0 takes a free one. Raises InvalidInput if the port
    is in use, WorkerLost if a worker was killed, WorkersFailed if workers ended with an error. No
    worker is left when it returns or raises, nor when this process is killed.
    """
    if not 0 <= port < 2**16:
        raise InvalidInput(f"port: cannot listen on {_LOOPBACK}:{port}: it is not 0 to 65535")
    try:
        listener = socket.create_server((_LOOPBACK, port))  # with SO_REUSEADDR
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise InvalidInput(f"port: cannot listen on {_LOOPBACK}:{port}: {reason}") from None
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
    workers: list[Process] = []
    # Only the main thread may handle signals, and gets them.
    is_main = threading.current_thread() is threading.main_thread()
    if is_main:
        previous = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        interrupted = signal.signal(signal.SIGINT, _Interrupted(workers))
    try:
        for rank in range(num_workers):
            place = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": num_workers,
                "LOCAL_WORLD_SIZE": num_workers,
                "MASTER_ADDR": _LOOPBACK,
                "MASTER_PORT": port,
                "TORCHELASTIC_USE_AGENT_STORE": True,  # the launcher keeps the store, not rank 0
                "GLOO_SOCKET_IFNAME": "lo",
                "NCCL_SOCKET_IFNAME": "lo",
            }
            environment = {name: str(value) for name, value in place.items()}
            workers.append(start(command, environment=environment))
        failed = wait(workers, _GRACE_S)
        if failed:
            raise _failure(workers, failed, failure(store))
    finally:
        end(workers, termination_s=TERMINATION_S)
        if is_main:
            signal.signal(signal.SIGTERM, previous)
            signal.signal(signal.SIGINT, interrupted)
        del store


class _Interrupted:
    """Passes the first Ctrl-C on to the workers, which save their state; the second ends them.

    A terminal sends it to all processes, a program or a scheduler to this one only.
    """

    def __init__(self, workers: Sequence[Process]) -> None:
        self._workers, self._is_second = workers, False

    def __call__(self, number: int, _: object) -> None:
        if self._is_second:
            raise KeyboardInterrupt
        self._is_second = True
        for worker in self._workers:
            worker.send(number)


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
