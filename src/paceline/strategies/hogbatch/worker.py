"""A worker's process: it asks for work, does it, and asks again, until it is told to stop.

`python -m paceline.strategies.hogbatch.worker ORDER` is how the coordinator starts one. The socket
and the memory are inherited descriptors. When the worker is told to stop, it leaves what it has
traced in a file in memory that is inherited too.
"""

import json
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from paceline.core.errors import InvalidInput
from paceline.core.timeline import Span
from paceline.links.shared_tensors import Entry, SharedTensors
from paceline.models import find
from paceline.native import die_with_parent
from paceline.strategies.hogbatch.ahead import MOST_TOLD, TELL_WITHIN_S
from paceline.strategies.hogbatch.messages import (
    MOST_NBYTES,
    READY,
    TRIED,
    ExecuteWork,
    Failure,
    Order,
    ScheduleWork,
)
from paceline.strategies.hogbatch.optimizers import optimizer_of
from paceline.strategies.hogbatch.replica import CpuReplica, Replica, Samples, median_seconds

_NS = 1e-9
INPUTS, TARGETS, ORDER, COMMITS = "inputs", "targets", "order", "commits"


class Memory(BaseModel):
    """A descriptor of shared memory, and what lies there."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    fd: int
    entries: tuple[Entry, ...]


class Learning(BaseModel):
    """What is trained and how: what all workers have in common."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    num_classes: int | None
    optimizer: str
    learning_rate: float
    momentum: float
    seed: int


class Employment(BaseModel):
    """Who a worker is, what it trains, and the descriptors of what it shares.

    `cores` are the processors that it is pinned to; none leaves it where it is.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: int
    kind: Literal["cpu", "gpu"]
    threads: int
    index: int
    slow: float
    cores: tuple[int, ...]
    launcher: int
    learning: Learning
    socket: int
    trace: int
    model: Memory
    data: Memory


@dataclass(frozen=True)
class _Shared:
    """What the worker sees of the memory of all."""

    model: Mapping[str, Tensor]
    samples: Samples
    order: Tensor
    commits: Tensor


class Worker:
    """Does what it is told, message by message."""

    def __init__(self, employment: Employment, wire: socket.socket) -> None:
        self._employment, self._wire = employment, wire
        self._shared = _attached(employment)
        self._num_traced = 0
        self._replica = self._new_replica(self._shared.model)
        self._trial: Replica | None = None
        self._untold: list[ScheduleWork] = []

    @property
    def spans(self) -> list[Span]:
        """What was traced."""
        return self._replica.spans

    def serve(self) -> None:
        """Ask for work until told to stop, or the coordinator is gone."""
        self._untold.append(ScheduleWork(READY))
        while (work := self._next()).order is not Order.STOP:
            self._untold.append(self._try(work) if work.order is Order.TRY else self._train(work))

    def _next(self) -> ExecuteWork:
        """Return what to do next. Before it waits for that, it says what it has done."""
        packet = None if self._is_due() else self._at_hand()
        if packet is None:
            self._wire.send(b"".join(message.packed() for message in self._untold))
            self._untold.clear()
            packet = self._wire.recv(MOST_NBYTES)
        return ExecuteWork.of(packet) if packet else ExecuteWork(Order.STOP)

    def _is_due(self) -> bool:
        """Whether the coordinator has to hear of what was done, though there is more to do."""
        if not self._untold:
            return False
        oldest_s = (time.monotonic_ns() - self._untold[0].ended_ns) * _NS
        return len(self._untold) == MOST_TOLD or oldest_s > TELL_WITHIN_S

    def _at_hand(self) -> bytes | None:
        """Return the next packet, if it has come."""
        try:
            return self._wire.recv(MOST_NBYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None

    def _train(self, work: ExecuteWork) -> ScheduleWork:
        self._trial = None
        step = self._num_traced if work.traced else None
        self._num_traced += work.traced
        rows = self._shared.order[work.first : work.first + work.size]
        done = self._replica.train(rows, work.rate, step)
        self._shared.commits[self._employment.number] = work.batch
        return ScheduleWork(work.batch, work.size, *done)

    def _try(self, work: ExecuteWork) -> ScheduleWork:
        if self._trial is None:
            copied = {name: tensor.clone() for name, tensor in self._shared.model.items()}
            self._trial = self._new_replica(copied)
        num_samples = len(self._shared.order)
        seconds = median_seconds(self._trial, num_samples, work.size, work.rate)
        return ScheduleWork(TRIED, work.size, ended_ns=round(seconds / _NS))

    def _new_replica(self, model: Mapping[str, Tensor]) -> Replica:
        employment, learning = self._employment, self._employment.learning
        make = optimizer_of(learning.optimizer, learning.learning_rate, learning.momentum)
        architecture = find(learning.model)
        build: Callable[[], nn.Module] = partial(architecture.build, learning.num_classes)
        samples, number = self._shared.samples, employment.number
        if employment.kind == "gpu":
            from paceline.strategies.hogbatch.cuda import CudaReplica

            device = _gpu(employment.index)
            return CudaReplica(build, model, make, samples, number, device)
        return CpuReplica(build, model, make, samples, number, employment.threads, employment.slow)


def _gpu(index: int) -> torch.device:
    if index >= torch.cuda.device_count():
        raise InvalidInput(
            f"workers: gpu:{index}: this machine has {torch.cuda.device_count()} GPUs"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _attached(employment: Employment) -> _Shared:
    model = SharedTensors(employment.model.fd, employment.model.entries)
    data = SharedTensors(employment.data.fd, employment.data.entries)
    if employment.kind == "gpu":
        from paceline.links.pinned import pin

        _gpu(employment.index)
        pin(model.memory)
    tensors = dict(data.tensors)
    order, commits = tensors[ORDER], tensors[COMMITS]
    for shared in (model, data):
        shared.close()
    return _Shared(model.tensors, Samples(tensors[INPUTS], tensors[TARGETS]), order, commits)


def _set_up(employment: Employment) -> None:
    die_with_parent(employment.launcher)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the coordinator gets it too, and ends us
    if employment.cores:
        os.sched_setaffinity(0, employment.cores)
    torch.set_num_threads(1)  # a worker's threads are its own
    torch.manual_seed(employment.learning.seed + 1 + employment.number)


def _leave_trace(fd: int, spans: list[Span]) -> None:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    with os.fdopen(fd, "w") as file:
        json.dump({"peak_memory_bytes": peak, "spans": spans}, file)


def main() -> None:
    """Work as the only argument says; a failure is told to the coordinator."""
    employment = Employment.model_validate_json(sys.argv[1])
    _set_up(employment)
    wire = socket.socket(fileno=employment.socket)
    try:
        worker = Worker(employment, wire)
        worker.serve()
    except ConnectionError:
        return  # the coordinator is gone, or has given this worker up
    except (Exception, SystemExit) as error:
        by_input = isinstance(error, InvalidInput)
        reason = str(error) if by_input else repr(error)
        wire.send(Failure(by_input, " ".join(reason.split())).packed())
        return
    _leave_trace(employment.trace, worker.spans)


if __name__ == "__main__":
    main()
