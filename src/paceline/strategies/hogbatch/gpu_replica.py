"""Overlap up to three batches of a GPU worker (Ma, Rusu et al. 2020, section VI-B).

The model for batch n is copied to the GPU once the shared model has the update of batch n-2. The
GPU adds the update of batch n-1, which is still on the GPU, to the copied model. So each batch
trains on a model with all earlier updates of its worker, while copies and the host's additions to
the shared model overlap with compute. The module `plan` has a drawing.
"""

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, groupby
from math import isfinite

import torch
from torch import Event, Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from paceline.core.cost import compute_lane, exchange_lane
from paceline.core.plan import Kind, Lane, Resource
from paceline.core.timeline import Span
from paceline.exchange.step import Learning
from paceline.links.clock import DeviceClock, DeviceMark
from paceline.links.devices import Device
from paceline.links.shared_memory import SharedTensors, tensors_in
from paceline.record.recorder import Borders, LayerMarks, Phase, in_seconds, layer_spans
from paceline.strategies.hogbatch.messages import BatchResult
from paceline.strategies.hogbatch.plan import HOST, MODEL
from paceline.strategies.hogbatch.replica import Learner, refer
from paceline.training.data.batch import Batch
from paceline.training.data.dataset import reader_of
from paceline.training.models.layers import layers_of
from paceline.training.recipes.recipe import OptimizerFactory, Recipe

_NS = 1e-9


@dataclass(slots=True)
class _Batch:
    """A loaded or running batch: its samples on the device, and time marks.

    `pinned`: the samples in pinned memory. `change`: first the replica's memory before the batch,
    then the difference that the batch made to it. `update`: a copy of this difference in pinned
    memory. `loss`: the loss on the device, and in pinned memory. These tensors stay alive
    until the batch's end, because copies on the streams use them.
    """

    size: int
    pinned: list[Tensor]
    samples: Batch
    marks: dict[str, DeviceMark]
    change: Tensor = field(init=False)
    update: Tensor = field(init=False)
    step: int | None = None
    loss: tuple[Tensor, ...] = ()
    borders: tuple[Borders, Borders] = ([], [])


class GpuReplica:
    """Trains a copy of the shared model on a GPU, and adds updates to the shared model.

    The host adds each update with PyTorch's CPU threads and without locks, so no worker waits for
    another worker. With `depth` 1, a batch's copies, compute and update do not overlap. `shared`
    must be in pinned memory. Bool tensors are not shared, because they cannot be added.

    A batch whose loss is not finite changes neither the shared model nor the model of later
    batches: its update is zero, and its optimizer step uses zero gradients. `optimizers`: a list
    with the replica's optimizer. `copy_in`: the stream that copies samples and the model to the
    GPU. `copy_out`: the stream that copies updates to the host.
    """

    def __init__(
        self,
        recipe: Recipe,
        shared: SharedTensors,
        make: OptimizerFactory,
        learning: Learning,
        worker: int,
        device: Device,
        depth: int = 3,
    ) -> None:
        self._depth, self._device, self._worker = depth, device, worker
        self.compute, self.copy_in = device.current_stream(), device.new_stream()
        self.copy_out = device.new_stream()
        # Number of (change, update) buffers; each begun and unfinished batch uses one of them.
        self._num_places = max(1, depth - 1)
        # After this event of the compute stream, `_copied` may be overwritten.
        self._taken: Event | None = None
        # The shared model's memory, a copy of it on the GPU, and the memory of the GPU's replica.
        self._shared, self._copied = shared.memory, shared.memory.to(device.torch_device)
        self._own = self._copied.clone()
        changes = [torch.empty_like(self._own) for _ in range(self._num_places)]
        self._places = cycle([(change, device.pinned_like(change)) for change in changes])
        # The slice of `_own` with the values of each dtype, except bool, which cannot be added.
        self._parts: dict[torch.dtype, slice] = {}
        for dtype, group in groupby(shared.entries, key=lambda one: one.dtype):
            entries = list(group)
            self._parts[dtype] = slice(entries[0].offset, entries[-1].end)
        self._parts.pop(torch.bool, None)
        tensors = tensors_in(self._own, shared.entries)
        model = refer(recipe.model().to(device.torch_device), tensors)
        self._learner = Learner(model, make, learning, reader_of(recipe.samples))
        self.optimizers = [self._learner.optimizer]
        self._marks = LayerMarks(layers_of(model), DeviceClock(device))
        self._begun: deque[_Batch] = deque()
        self.spans: list[Span] = []

    def take(self, rows: Tensor, rate: float, step: int | None) -> Iterator[BatchResult]:
        """Begin a batch; first finish as many earlier batches as needed, and yield their results.

        With a `depth` above 1, copying the samples overlaps with this wait for earlier batches.
        """
        while len(self._begun) >= self._depth:
            yield self.finish()
        batch = self.load(rows)
        while len(self._begun) >= self._num_places:
            yield self.finish()
        self.begin(batch, rate, step)

    def done(self, *, waits: bool = False) -> Iterator[BatchResult]:
        """Yield results of batches whose updates are on the host; `waits`: wait for all batches."""
        while self._begun and (waits or self._begun[0].marks["update"].event.query()):
            yield self.finish()

    def load(self, rows: Tensor) -> _Batch:
        """Gather samples and queue their copies to the GPU, while earlier batches run."""
        with self._device.use(self.copy_in):
            marks, to = {"start": self._marks.clock.mark()}, self._device.torch_device
            leaves, spec = tree_flatten(self._learner.read(rows))
            pinned = [self._device.pinned_like(one).copy_(one) for one in leaves]
            copied = [one.to(to, non_blocking=True) for one in pinned]
            marks["samples"] = self._marks.clock.mark()
            return _Batch(len(rows), pinned, Batch.of(tree_unflatten(copied, spec)), marks)

    def begin(self, batch: _Batch, rate: float, step: int | None) -> None:
        """Queue the work of a loaded batch: copy the model, train, copy the update."""
        batch.step, (batch.change, batch.update) = step, next(self._places)
        if self._taken is not None:
            self.copy_in.wait_event(self._taken)
        with self._device.use(self.copy_in):
            batch.marks["copying"] = self._marks.clock.mark()
            self._copied.copy_(self._shared, non_blocking=True)
            batch.marks["model"] = self._marks.clock.mark()
        self.compute.wait_event(batch.marks["model"].event)
        with self._device.use(self.compute):
            self._train(batch, rate)
        self.copy_out.wait_stream(self.compute)
        with self._device.use(self.copy_out):
            batch.marks["copying_out"] = self._marks.clock.mark()
            batch.update.copy_(batch.change, non_blocking=True)
            loss, here = batch.loss
            here.copy_(loss, non_blocking=True)
            batch.marks["update"] = self._marks.clock.mark()
        self._begun.append(batch)

    def _train(self, batch: _Batch, rate: float) -> None:
        """Train on a batch, with zero gradients if its loss is not finite."""
        mark = self._marks.clock.mark
        batch.marks["begun"] = mark()
        for own, copied in self._values(self._own, self._copied):
            own.copy_(copied)
        if self._begun:  # the copied model lacks the update of the previous batch
            for own, change in self._values(self._own, self._begun[-1].change):
                own.add_(change)
        batch.change.copy_(self._own)
        self._taken = self._device.record()
        self._marks.watch(batch.step is not None)
        loss = self._learner.loss(batch.samples)
        batch.marks["forward"] = mark()
        loss.backward()
        batch.marks["backward"] = mark()
        batch.borders = self._marks.forward, self._marks.backward
        is_lost = loss.detach().isfinite().logical_not()
        clear_gradients(self._learner.parameters, is_lost)
        self._learner.set_rate(rate)
        self._learner.step()
        for own, change in self._values(self._own, batch.change):
            torch.sub(own, change, out=change)
        batch.change.masked_fill_(is_lost, 0)
        batch.loss = loss.detach(), self._device.pinned_like(loss.detach())
        batch.marks["step"] = mark()

    def finish(self) -> BatchResult:
        """Wait for the oldest batch's update, and add it to the shared model."""
        batch = self._begun.popleft()
        batch.marks["update"].event.synchronize()
        for later in self._begun:
            # `later` adds this update on the GPU. So wait until it has copied the model; otherwise
            # its copy could contain the update already.
            later.marks["model"].event.synchronize()
        loss = float(batch.loss[1])
        added_ns = time.monotonic_ns()
        if isfinite(loss):
            for shared, update in self._values(self._shared, batch.update):
                shared.add_(update)
        ended_ns = time.monotonic_ns()
        seconds = self._marks.clock.seconds(list(batch.marks.values()))
        times = dict(zip(batch.marks, seconds, strict=True))
        times["adding"] = max(added_ns * _NS, times["update"])
        times["end"] = max(ended_ns * _NS, times["adding"])
        if batch.step is not None:
            self._trace(batch, batch.step, times)
        keys = ("copying", "begun", "step", "end")
        return BatchResult(loss * batch.size, *(round(times[key] / _NS) for key in keys))

    def _values(self, *memories: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield one tuple per dtype: its values in each of `memories`, as flat tensors."""
        for dtype, part in self._parts.items():
            yield tuple(memory[part].view(dtype) for memory in memories)

    def _trace(self, batch: _Batch, step: int, times: Mapping[str, float]) -> None:
        worker, device = self._worker, f"gpu{self._worker}"
        lane, exchange = compute_lane(device), exchange_lane(device)
        to_gpu, to_host = Resource(device, Lane.H2D), Resource(device, Lane.D2H)
        forward, backward = (in_seconds(one, self._marks.clock) for one in batch.borders)
        begun_s, forward_s, backward_s = times["begun"], times["forward"], times["backward"]
        phases = (
            Phase(Kind.FORWARD, begun_s, forward_s, forward_s, forward),
            Phase(Kind.BACKWARD, forward_s, backward_s, backward_s, backward),
        )

        def span(kind: Kind, part: str, first: str, last: str, *on: Resource) -> Span:
            start_s, end_s = times[first], times[last]
            return Span(kind, step, part, worker, on, start_s, end_s, num_samples=batch.size)

        self.spans += [
            span(Kind.H2D, "batch", "start", "samples", to_gpu),
            span(Kind.H2D, MODEL, "copying", "model", to_gpu, exchange),
            *layer_spans(step, worker, lane, self._marks.names, phases),
            span(Kind.STEP, "", "backward", "step", lane),
            span(Kind.D2H, "update", "copying_out", "update", to_host),
            span(Kind.REDUCE, "update", "adding", "end", exchange, Resource(HOST, Lane.REDUCE)),
        ]


@torch.no_grad()
def clear_gradients(parameters: Sequence[nn.Parameter], where: Tensor) -> None:
    """Queue kernels that zero all gradients if `where`, a bool on the device, is true."""
    for parameter in parameters:
        if (gradient := parameter.grad) is not None:
            values = gradient._values() if gradient.is_sparse else gradient
            values.masked_fill_(where, 0)
