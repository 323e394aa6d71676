"""A worker process: it asks for work, does it, and asks again, until it is told to stop.

`python -m paceline.strategies.hogbatch.worker SETTINGS` is how the coordinator starts one. The
socket and the memory are inherited descriptors. When it is told to stop, it writes the spans that
it has traced to the file in memory of its state.
"""

import os
import resource
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from paceline.checkpoints.memory_file import read_state, write_state
from paceline.checkpoints.worker_state import load_state, state_of
from paceline.core.error_lines import told
from paceline.core.errors import InvalidInput
from paceline.core.machine import DeviceKind
from paceline.core.timeline import Span
from paceline.exchange.setup import learning_of, optimizer_by
from paceline.links.devices import Device
from paceline.links.failpoints import reach
from paceline.links.shared_memory import SharedTensors
from paceline.links.worker_signals import tell_starter
from paceline.strategies.hogbatch import messages, replica
from paceline.strategies.hogbatch.config import adding_threads, parse_workers
from paceline.strategies.hogbatch.gpu_replica import GpuReplica
from paceline.strategies.hogbatch.messages import Command, ExecuteWork, Failure, ScheduleWork
from paceline.strategies.hogbatch.policy import MOST_REPORTED
from paceline.strategies.hogbatch.statistics import BatchResult
from paceline.training.data.dataset import Dataset, TensorSamples
from paceline.training.recipes.named import recipe_of
from paceline.training.recipes.recipe import Recipe

_NS = 1e-9
_REPORT_WITHIN_S = 0.02  # of a batch's end, though there is more to do
_POLL_S = 1e-3  # an event of a GPU has no descriptor that one could wait for


class _Executor:
    """Executes the coordinator's commands: up to the replica's `depth` of batches at once."""

    def __init__(
        self, settings: messages.ProcessSettings, wire: socket.socket, device: Device
    ) -> None:
        self._settings, self._wire, self._device = settings, wire, device
        training = settings.training
        self._parameters, data = SharedTensors(*training.parameters), SharedTensors(*training.data)
        for tensors in (self._parameters, data):
            tensors.close()  # the inherited descriptor; the memory stays mapped
        self._unpin = device.pin(self._parameters.memory)
        shared = data.tensors
        self._recipe = _recipe(training, shared)
        self._order, self._committed = shared[messages.ORDER], shared[messages.COMMITTED]
        self._num_traced = 0
        self._seed()
        self._replica = self._new_replica(self._parameters)
        self._trial: tuple[replica.WorkerReplica, Callable[[], None]] | None = None
        self._begun: deque[ExecuteWork] = deque()
        self._unreported: list[ScheduleWork] = []

    def run(self) -> list[Span]:
        """Ask for work until told to stop, or the coordinator is gone; return what was traced."""
        self._unreported.append(ScheduleWork(messages.READY))
        while (work := self._next()) is None or work.command is not Command.STOP:
            if work is None:
                self._complete(self._replica.finish())
            else:
                self._execute(work)
        while self._begun:
            self._complete(self._replica.finish())
        self._unpin()
        return self._replica.spans

    def _next(self) -> ExecuteWork | None:
        """Return the next command, or None if the oldest batch in work is done before it comes.

        Report what was done before waiting for it.
        """
        if self._begun and self._replica.is_done:
            return None
        packet, unreported = None, self._unreported
        oldest_ns = time.monotonic_ns() - unreported[0].result.ended_ns if unreported else 0
        if len(unreported) < MOST_REPORTED and oldest_ns * _NS <= _REPORT_WITHIN_S:
            with suppress(BlockingIOError):  # nothing has come yet
                packet = self._wire.recv(messages.MOST_NBYTES, socket.MSG_DONTWAIT)
        if packet is None:
            if unreported:
                self._wire.send(b"".join(message.pack() for message in unreported))
                unreported.clear()
            while self._begun and not select.select([self._wire], [], [], _POLL_S)[0]:
                if self._replica.is_done:
                    return None
            packet = self._wire.recv(messages.MOST_NBYTES)
        return ExecuteWork.unpack(packet) if packet else ExecuteWork(Command.STOP)

    def _execute(self, work: ExecuteWork) -> None:
        if work.command is Command.TRY:
            self._unreported.append(self._try(work))
            return
        if self._trial is not None:
            (_, unpin), self._trial = self._trial, None
            unpin()
            self._seed()  # trials draw random numbers, as many as they have time for
        if work.command is Command.TRAIN:
            self._train(work)
            return
        optimizers, file = self._replica.optimizers, self._settings.state
        if work.command is Command.SAVE:
            write_state(file, *state_of(optimizers, self._device))
        else:
            load_state(optimizers, self._device, *read_state(file))
        is_saved = work.command is Command.SAVE
        self._unreported.append(ScheduleWork(messages.SAVED if is_saved else messages.LOADED))

    def _seed(self) -> None:
        torch.manual_seed(self._settings.training.settings.seed + 1 + self._settings.number)

    def _train(self, work: ExecuteWork) -> None:
        step = self._num_traced if work.traced else None
        self._num_traced += work.traced
        rows = self._order[work.first : work.places.stop]
        for result in replica.train_next(self._replica, rows, work.rate, step):
            self._complete(result)
        self._begun.append(work)

    def _complete(self, result: BatchResult) -> None:
        work = self._begun.popleft()
        # In shared memory, so that a batch counts even if this process is killed before it reports.
        self._committed[self._settings.number] = work.batch
        reach("batch.done", worker=self._settings.number, batch=work.batch)
        self._unreported.append(ScheduleWork(work.batch, work.size, result))

    def _try(self, work: ExecuteWork) -> ScheduleWork:
        if self._trial is None:
            copied = SharedTensors.of(self._parameters.tensors, "the model in a trial")
            copied.close()
            unpin = self._device.pin(copied.memory)
            self._trial = self._new_replica(copied), unpin
        trial, _ = self._trial
        seconds = replica.median_seconds(trial, len(self._order), work.size, work.rate)
        return ScheduleWork(messages.TRIED, work.size, BatchResult(ended_ns=round(seconds / _NS)))

    def _new_replica(self, parameters: SharedTensors) -> replica.WorkerReplica:
        training, spec, number = self._settings.training, self._settings.spec, self._settings.number
        settings, recipe = training.settings, self._recipe
        make, learning = optimizer_by(recipe, settings), learning_of(recipe, settings)
        if spec.kind == DeviceKind.GPU:
            num_cores = len(os.sched_getaffinity(0))
            threads = adding_threads(parse_workers(settings.workers), num_cores)
            depth = self._settings.depth
            return GpuReplica(
                recipe, parameters, make, number, self._device, depth, threads, learning
            )
        threads, tensors = spec.threads, parameters.tensors
        return replica.CpuReplica(recipe, tensors, make, number, threads, spec.slow, learning)


def _recipe(training: messages.Training, shared: Mapping[str, Tensor]) -> Recipe:
    """Return the recipe without its tests; its samples are shared, or of this process alone."""
    settings, loaded = training.settings, None
    if messages.INPUTS in shared:
        inputs, targets = shared[messages.INPUTS], shared[messages.TARGETS]
        samples, shape = TensorSamples(inputs, targets), tuple(inputs.shape[1:])
        loaded = Dataset("shared", samples, samples, training.num_classes or 0, shape)
    recipe = recipe_of(settings.model, settings.data, settings.seed, loaded)
    return replace(recipe, train=recipe.train if loaded is None else loaded.train, test=None)


def main() -> None:
    """Work with the settings in the only argument; report a failure to the coordinator."""
    settings = messages.ProcessSettings.model_validate_json(sys.argv[1])
    tell_starter()
    if settings.cores:
        os.sched_setaffinity(0, settings.cores)
    torch.set_num_threads(1)  # a replica on cores has threads of its own
    wire = socket.socket(fileno=settings.socket)
    try:
        device = replica.device_for(settings.spec)
        with device.use():
            spans = _Executor(settings, wire, device).run()
    except ConnectionError:
        return  # the coordinator is gone, or has dropped this worker
    except (Exception, SystemExit) as error:
        by_input = isinstance(error, InvalidInput)
        reason = told(error, settings.number)
        with suppress(ConnectionError):  # another worker has failed first
            wire.send(Failure(by_input, " ".join(reason.split())).pack())
        return
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    messages.leave(settings.state, spans, peak)


if __name__ == "__main__":
    main()
