"""A worker process: it asks for work, does it, and asks again, until it is told to stop.

`python -m paceline.strategies.hogbatch.worker SETTINGS` is how the coordinator starts one. The
socket and the memory are inherited descriptors. When it is told to stop, it writes the spans that
it has traced to a file in memory, which is inherited too.
"""

import json
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from paceline.core.errors import InvalidInput
from paceline.core.machine import DeviceKind
from paceline.core.timeline import Span
from paceline.links.shared_memory import SharedTensors, pin
from paceline.models import find
from paceline.models.factory import optimizer_of
from paceline.strategies.hogbatch import messages, replica
from paceline.strategies.hogbatch.messages import Command, ExecuteWork, Failure, ScheduleWork
from paceline.strategies.hogbatch.policy import MOST_REPORTED
from paceline.strategies.hogbatch.statistics import BatchResult

_NS = 1e-9
_REPORT_WITHIN_S = 0.02  # of a batch's end, though there is more to do


class _Executor:
    """Executes the coordinator's commands, one after another."""

    def __init__(self, settings: messages.ProcessSettings, wire: socket.socket) -> None:
        self._settings, self._wire = settings, wire
        training, spec = settings.training, settings.spec
        parameters, data = SharedTensors(*training.parameters), SharedTensors(*training.data)
        for tensors in (parameters, data):
            tensors.close()  # the inherited descriptor; the memory stays mapped
        if spec.kind == DeviceKind.GPU:
            if spec.index >= torch.cuda.device_count():
                raise InvalidInput(
                    f"workers: {spec}: this machine has {torch.cuda.device_count()} GPUs"
                )
            torch.cuda.set_device(spec.index)
            pin(parameters.memory)
        self._parameters, shared = parameters.tensors, data.tensors
        self._samples = shared[messages.INPUTS], shared[messages.TARGETS]
        self._order, self._committed = shared[messages.ORDER], shared[messages.COMMITTED]
        self._num_traced = 0
        self._replica = self._new_replica(self._parameters)
        self._trial: replica.WorkerReplica | None = None
        self._unreported: list[ScheduleWork] = []

    def run(self) -> list[Span]:
        """Ask for work until told to stop, or the coordinator is gone; return what was traced."""
        self._unreported.append(ScheduleWork(messages.READY))
        while (work := self._next()).command is not Command.STOP:
            done = self._try(work) if work.command is Command.TRY else self._train(work)
            self._unreported.append(done)
        return self._replica.spans

    def _next(self) -> ExecuteWork:
        """Return the next command. Report what was done before waiting for it."""
        packet, unreported = None, self._unreported
        oldest_ns = time.monotonic_ns() - unreported[0].result.ended_ns if unreported else 0
        if len(unreported) < MOST_REPORTED and oldest_ns * _NS <= _REPORT_WITHIN_S:
            with suppress(BlockingIOError):  # nothing has come yet
                packet = self._wire.recv(messages.MOST_NBYTES, socket.MSG_DONTWAIT)
        if packet is None:
            self._wire.send(b"".join(message.pack() for message in self._unreported))
            self._unreported.clear()
            packet = self._wire.recv(messages.MOST_NBYTES)
        return ExecuteWork.unpack(packet) if packet else ExecuteWork(Command.STOP)

    def _train(self, work: ExecuteWork) -> ScheduleWork:
        self._trial = None
        step = self._num_traced if work.traced else None
        self._num_traced += work.traced
        rows = self._order[work.first : work.places.stop]
        result = self._replica.train(rows, work.rate, step)
        # In shared memory, so that a batch counts even if this process is killed before it reports.
        self._committed[self._settings.number] = work.batch
        return ScheduleWork(work.batch, work.size, result)

    def _try(self, work: ExecuteWork) -> ScheduleWork:
        if self._trial is None:
            copied = {name: tensor.clone() for name, tensor in self._parameters.items()}
            self._trial = self._new_replica(copied)
        seconds = replica.median_seconds(self._trial, len(self._order), work.size, work.rate)
        return ScheduleWork(messages.TRIED, work.size, BatchResult(ended_ns=round(seconds / _NS)))

    def _new_replica(self, parameters: Mapping[str, Tensor]) -> replica.WorkerReplica:
        training, spec, number = self._settings.training, self._settings.spec, self._settings.number
        settings = training.settings
        make = optimizer_of(settings.optimizer, settings.learning_rate, settings.momentum)
        build = partial(find(training.model).build, training.num_classes)
        if spec.kind == DeviceKind.GPU:
            device = torch.device("cuda", spec.index)
            return replica.CudaReplica(build, parameters, make, self._samples, number, device)
        return replica.CpuReplica(
            build, parameters, make, self._samples, number, spec.threads, spec.slow
        )


def main() -> None:
    """Work with the settings in the only argument; report a failure to the coordinator."""
    settings = messages.ProcessSettings.model_validate_json(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the coordinator gets it too, and ends us
    if settings.cores:
        os.sched_setaffinity(0, settings.cores)
    torch.set_num_threads(1)  # a replica on cores has threads of its own
    torch.manual_seed(settings.training.settings.seed + 1 + settings.number)
    wire = socket.socket(fileno=settings.socket)
    try:
        spans = _Executor(settings, wire).run()
    except ConnectionError:
        return  # the coordinator is gone, or has dropped this worker
    except (Exception, SystemExit) as error:
        by_input = isinstance(error, InvalidInput)
        reason = str(error) if by_input else repr(error)
        wire.send(Failure(by_input, " ".join(reason.split())).pack())
        return
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    with os.fdopen(settings.trace, "w") as file:
        json.dump({"peak_memory_bytes": peak, "spans": spans}, file)


if __name__ == "__main__":
    main()
