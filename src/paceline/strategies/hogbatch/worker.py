"""A worker process, which requests batches and trains on them until it gets Command.STOP.

The coordinator runs `python -m paceline.strategies.hogbatch.worker WIRE`; WIRE holds the
descriptors of a `Wire`, a socket and a shared file. At the end the worker writes its traced spans
and its peak memory in bytes to this file.
"""

import os
import resource
import select
import sys
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from statistics import median
from typing import Any

import torch

from paceline.checkpoints.state import load_worker_state, worker_state
from paceline.core.error_lines import exit_code
from paceline.core.machine import DeviceKind
from paceline.core.timeline import Span
from paceline.exchange.setup import learning_of, optimizer_by
from paceline.links.devices import Device
from paceline.links.failpoints import reach
from paceline.links.packet_workers import Failure, Wire
from paceline.links.shared_memory import SharedTensors
from paceline.measure.timing import FEWEST_ROUNDS
from paceline.strategies.hogbatch import messages
from paceline.strategies.hogbatch.config import adding_threads, parse_workers
from paceline.strategies.hogbatch.gpu_replica import GpuReplica
from paceline.strategies.hogbatch.replica import CpuReplica, device_for
from paceline.strategies.hogbatch.scheduler import MOST_REPORTED
from paceline.training.data.dataset import Dataset, TensorSamples
from paceline.training.recipes.named import recipe_of
from paceline.training.recipes.recipe import Recipe

_NS = 1e-9
_NUM_WARM_UP = 2  # number of untimed batches before a speed trial
_REPORT_WITHIN_S = 0.02  # report a finished batch within this time, even if more work is waiting
_POLL_S = 1e-3  # time between polls of GPU events, which have no file descriptor to wait for
Replica = CpuReplica | GpuReplica


def median_seconds(replica: Replica, num_samples: int, size: int, seconds: float) -> float:
    """Return the median seconds per batch of `size` samples, measured for about `seconds`.

    If batches overlap, a batch's time begins at the end of the previous batch.
    """
    rows = torch.arange(size) % num_samples
    num_done = last_ns = 0
    took: list[float] = []
    until_s = time.monotonic() + seconds
    while len(took) < FEWEST_ROUNDS or time.monotonic() < until_s:
        for done in chain(replica.take(rows, 1.0, None), replica.done()):
            if num_done >= _NUM_WARM_UP:
                took.append((done.ended_ns - max(done.started_ns, last_ns)) * _NS)
            num_done, last_ns = num_done + 1, done.ended_ns
    for _ in replica.done(waits=True):
        pass
    return median(took)


class _Executor:
    """Executes the coordinator's commands."""

    def __init__(self, settings: messages.ProcessSettings, wire: Wire, device: Device) -> None:
        self._settings, self._wire, self._device = settings, wire, device
        training = settings.training
        for tensors in (training.parameters, training.data):
            tensors.close()  # closes only the inherited descriptor: the memory stays mapped
        self._unpin = device.pin(training.parameters.memory)
        self._recipe, self._shared = _recipe(training), training.data.tensors
        self._seed()
        self._replica = self._new_replica(training.parameters)
        self._begun: deque[messages.ExecuteWork] = deque()
        self._unreported: list[messages.BatchResult] = []

    def run(self) -> list[Span]:
        """Request and execute work until the stop command; return the traced spans."""
        self._wire.send(())
        while (message := self._next()) not in (messages.Command.STOP, None):
            if isinstance(message, messages.ExecuteWork):
                rows = self._shared[messages.ORDER][message.first : message.places.stop]
                self._begun.append(message)
                self._complete(self._replica.take(rows, message.rate, message.step))
            else:
                self._wire.send(self._obey(message))
        self._complete(self._replica.done(waits=True))
        self._unpin()
        return self._replica.spans

    def _next(self) -> Any:
        """Return the next message; if none has arrived, first report completed batches."""
        unreported = self._unreported
        while True:
            self._complete(self._replica.done())
            oldest_ns = time.monotonic_ns() - unreported[0].ended_ns if unreported else 0
            if len(unreported) < MOST_REPORTED and oldest_ns * _NS <= _REPORT_WITHIN_S:
                with suppress(BlockingIOError):  # no message yet
                    return self._wire.receive(waits=False)
            if unreported:
                self._wire.send(tuple(unreported))
                unreported.clear()
            if not self._begun:
                return self._wire.receive()
            select.select([self._wire], [], [], _POLL_S)

    def _obey(self, command: messages.Command) -> messages.Command | messages.SpeedTrial:
        """Execute a command other than STOP, and return the answer to the coordinator.

        SAVE writes the states of optimizers and random number generators to the file that the
        worker shares with the coordinator; LOAD reads them.
        """
        if command is messages.Command.TRY:
            return self._try()
        optimizers = self._replica.optimizers
        if command is messages.Command.SAVE:
            self._wire.write(worker_state(optimizers, self._device))
        else:
            load_worker_state(optimizers, self._device, *self._wire.read())
        return command

    def _seed(self) -> None:
        torch.manual_seed(self._settings.training.settings.seed + 1 + self._settings.number)

    def _complete(self, results: Iterable[messages.BatchResult]) -> None:
        number = self._settings.number
        for result in results:
            work = self._begun.popleft()
            # Write to shared memory, so that the batch counts even if this process is killed
            # before it reports the batch.
            self._shared[messages.COMMITTED][number] = work.batch
            reach("batch.done", worker=number, batch=work.batch)
            self._unreported.append(result)

    def _try(self) -> messages.SpeedTrial:
        """Measure the time of a small and of a large batch, on a copy of the model.

        The small batch has one sample per CPU thread or one per GPU, the large one `batch_size`.
        """
        number, spec, _, _, training = self._settings
        num_samples, settings = len(self._shared[messages.ORDER]), training.settings
        most = min(settings.batch_size, num_samples)
        copied = SharedTensors.of(training.parameters.tensors, "the model in a trial")
        copied.close()
        unpin = self._device.pin(copied.memory)
        trial = self._new_replica(copied)
        seconds = {
            size: median_seconds(trial, num_samples, size, settings.profile_s / 2)
            for size in sorted({min(spec.threads, most), most})
        }
        unpin()
        self._seed()  # reset: how many random numbers a trial draws depends on its speed
        return messages.SpeedTrial(number, spec, seconds)

    def _new_replica(self, parameters: SharedTensors) -> Replica:
        own, settings, recipe = self._settings, self._settings.training.settings, self._recipe
        learnt = optimizer_by(recipe, settings), learning_of(recipe, settings), own.number
        if own.spec.kind == DeviceKind.GPU:
            return GpuReplica(recipe, parameters, *learnt, self._device, own.depth)
        return CpuReplica(recipe, parameters.tensors, *learnt, own.spec)


def _recipe(training: messages.Training) -> Recipe:
    """Return the recipe without test data; any shared samples replace its training data."""
    settings, shared, loaded = training.settings, training.data.tensors, None
    if messages.INPUTS in shared:
        inputs, targets = shared[messages.INPUTS], shared[messages.TARGETS]
        samples, shape = TensorSamples(inputs, targets), tuple(inputs.shape[1:])
        loaded = Dataset("shared", samples, samples, training.num_classes or 0, shape)
    recipe = recipe_of(settings.model, settings.data, settings.seed, loaded)
    return replace(recipe, train=recipe.train if loaded is None else loaded.train, test=None)


def main() -> None:
    """Run a worker with the coordinator's settings; report a failure to the coordinator."""
    settings, wire = Wire.to_starter(sys.argv[1])
    if settings.cores:
        os.sched_setaffinity(0, settings.cores)
    if settings.spec.kind == DeviceKind.CPU:
        torch.set_num_threads(1)  # `CpuReplica` has its own threads
    else:
        workers = parse_workers(settings.training.settings.workers)
        torch.set_num_threads(adding_threads(workers, len(os.sched_getaffinity(0))))
    try:
        device = device_for(settings.spec)
        with device.use():
            spans = _Executor(settings, wire, device).run()
    except ConnectionError:
        return  # the coordinator has ended, or dropped this worker
    except (Exception, SystemExit) as error:
        with suppress(ConnectionError):  # the coordinator ended after another worker's failure
            wire.send(Failure.of(error, settings.number))
        sys.exit(exit_code(error))
    wire.write((spans, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))


if __name__ == "__main__":
    main()
