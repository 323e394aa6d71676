"""The replica of a worker on a GPU, with up to three batches in work (section VI-B).

    host     [add the update of n-1]      [gather the samples of n+2]   [add the update of n]
    in                      [model for n+1]            [samples of n+2]
    compute  [batch n: forward  backward   step][batch n+1: forward    backward   step]
    out      [update of n-1]                    [update of n]

The shared model is copied in for a batch when the update of the last but one is in it. The update
of the last one is not: the device still has it, and adds it. So a batch is trained on a model with
all updates of its own worker, each once, while copies and sums run beside the computing.
"""

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from math import isfinite

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_unflatten

from paceline.core.cost import compute_lane, exchange_lane
from paceline.core.plan import Kind, Lane, Resource
from paceline.core.timeline import Span
from paceline.exchange.step import Learning
from paceline.links.clock import DeviceClock, DeviceMark
from paceline.links.devices import Device, Event
from paceline.links.shared_memory import SharedTensors, TensorSpec, tensors_in
from paceline.record.recorder import Borders, LayerMarks, Phase, in_seconds, layer_spans
from paceline.strategies.hogbatch.plan import HOST, MODEL
from paceline.strategies.hogbatch.replica import ScaledOptimizer, loss_of, reader_of, refer
from paceline.strategies.hogbatch.statistics import BatchResult
from paceline.training.data.batch import Batch
from paceline.training.models.layers import layers_of
from paceline.training.recipes.recipe import OptimizerFactory, Recipe

_NS = 1e-9
_LEAST_ADDED = 1 << 18  # values that are worth a thread


@dataclass(frozen=True)
class _Run:
    """The model's tensors of one type, which lie beside each other, as flat tensors (N,).

    `shared`: of the shared model, in pinned memory. `own`: of the replica. `copied`: the shared
    model as it was copied in. Of batches in turn: `changes`, which is the replica when the batch
    begins, and when it ends what has changed since; `updates`, their copies in pinned memory.
    """

    shared: Tensor
    own: Tensor
    copied: Tensor
    changes: tuple[Tensor, ...]
    updates: tuple[Tensor, ...]

    def take(self, place: int, missing: int | None) -> None:
        """Make what was copied in the replica, with the change that is not yet in it, if any."""
        if missing is None:
            self.own.copy_(self.copied)
        else:
            torch.add(self.copied, self.changes[missing], out=self.own)
        self.changes[place].copy_(self.own)

    def keep_change(self, place: int, is_lost: Tensor) -> None:
        """Keep what the batch has changed; nothing if its loss is not finite."""
        change = self.changes[place]
        torch.sub(self.own, change, out=change).masked_fill_(is_lost, 0)

    def pieces(self, place: int, threads: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Return pieces of the shared model, one for each thread, with what is added to them."""
        num_pieces = max(1, min(threads, len(self.shared) // _LEAST_ADDED))
        update = self.updates[place]
        return zip(
            self.shared.tensor_split(num_pieces), update.tensor_split(num_pieces), strict=True
        )


def _runs(entries: Sequence[TensorSpec]) -> Iterator[tuple[torch.dtype, slice]]:
    """Yield the bytes of tensors that lie beside each other and have one type, which can be added.

    Tensors of bool cannot: they stay as they are.
    """
    for dtype, group in groupby(entries, key=lambda one: one.dtype):
        own = list(group)
        place = slice(own[0].offset, own[-1].end)
        if dtype != "bool" and place.start < place.stop:
            yield getattr(torch, dtype), place


@dataclass(slots=True)
class _Batch:
    """A batch in work: its samples on the device, and marks where parts of its work are done.

    Both copies of the samples are kept until the batch is finished, as streams may use them.
    """

    size: int
    pinned: list[Tensor]
    samples: Batch
    marks: dict[str, DeviceMark]
    step: int | None = None
    borders: tuple[Borders, Borders] = ([], [])


class GpuReplica:
    """A copy of the shared model on a GPU, whose updates are pushed into it.

    One stream copies samples and model in, the current one computes, and a third copies updates
    out. The host then adds an update to the model as it is by then, with `threads` threads: other
    workers have changed it meanwhile, and no worker waits for another. With a `depth` of 1 all of
    that is done one after another. `shared` is in pinned memory. `learning` is by default the
    recipe's loss alone; each batch's own gradient is clipped.

    With a loss that is not finite the model is left as it is, and so is what later batches are
    trained on; the optimizer has made a step with gradients of zero.
    """

    def __init__(
        self,
        recipe: Recipe,
        shared: SharedTensors,
        make: OptimizerFactory,
        worker: int,
        device: Device,
        depth: int = 3,
        threads: int = 1,
        learning: Learning | None = None,
    ) -> None:
        self.depth, self._device, self._worker, self._threads = depth, device, worker, threads
        self._compute, self._in, self._out = (
            device.current_stream(),
            device.new_stream(),
            device.new_stream(),
        )
        memory = shared.memory.to(device.torch_device)
        model = recipe.model().to(device.torch_device).train()
        self._model = refer(model, tensors_in(memory, shared.entries))
        self._learning = learning or Learning(recipe.loss, name=recipe.name)
        self._optimizer = ScaledOptimizer(self._model, make, self._learning.clip_norm)
        self._num_places = max(1, depth - 1)  # of the batches that have begun
        self._runs = [
            self._run(dtype, shared.memory[place], memory[place])
            for dtype, place in _runs(shared.entries)
        ]
        self._losses = torch.zeros(
            self._num_places, dtype=torch.float64, device=device.torch_device
        )
        self._losses_here = device.pinned_like(self._losses)
        self._read = reader_of(recipe.samples)
        self._adders = ThreadPoolExecutor(threads)
        self._clock = DeviceClock(device)  # waits for what was made in the current stream
        self._marks = LayerMarks(layers_of(self._model), self._clock)
        self._num_finished = 0
        self._loaded: _Batch | None = None
        self._begun: deque[_Batch] = deque()
        self._taken: Event | None = None  # reached when `copied` may be written again
        self.spans: list[Span] = []

    def _run(self, dtype: torch.dtype, shared: Tensor, own: Tensor) -> _Run:
        values = own.view(dtype)
        changes = tuple(torch.empty_like(values) for _ in range(self._num_places))
        return _Run(
            shared.view(dtype),
            values,
            torch.empty_like(values),
            changes,
            tuple(self._device.pinned_like(one) for one in changes),
        )

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The only optimizer."""
        return [self._optimizer.optimizer]

    @property
    def num_begun(self) -> int:
        """The batches that have begun, and are not finished."""
        return len(self._begun)

    @property
    def is_done(self) -> bool:
        """True if the update of the oldest batch has arrived on the host."""
        return bool(self._begun) and self._begun[0].marks["update"].event.is_reached

    def load(self, rows: Tensor) -> None:
        """Gather samples and queue their copies, beside the batches that are in work."""
        assert self._loaded is None
        with self._device.use(self._in):
            marks, to = {"start": self._clock.mark()}, self._device.torch_device
            leaves, spec = tree_flatten(self._read(rows))
            pinned = [self._device.pinned_like(one).copy_(one) for one in leaves]
            copied = [one.to(to, non_blocking=True) for one in pinned]
            marks["samples"] = self._clock.mark()
            samples = Batch.of(tree_unflatten(copied, spec))
            self._loaded = _Batch(len(rows), pinned, samples, marks)

    def begin(self, rate: float, step: int | None) -> None:
        """Queue the loaded batch, and the copies of the model for it and of its update."""
        assert self._loaded is not None
        assert len(self._begun) < self._num_places
        batch, self._loaded = self._loaded, None
        batch.step = step
        place = (self._num_finished + len(self._begun)) % self._num_places
        self._copy_model_in(batch)
        self._train(batch, place, rate)
        self._copy_out(batch, place)
        self._begun.append(batch)

    def _copy_model_in(self, batch: _Batch) -> None:
        if self._taken is not None:
            self._in.wait(self._taken)
        with self._device.use(self._in):
            batch.marks["copying"] = self._clock.mark()
            for run in self._runs:
                run.copied.copy_(run.shared, non_blocking=True)
            batch.marks["model"] = self._clock.mark()

    def _train(self, batch: _Batch, place: int, rate: float) -> None:
        self._compute.wait(batch.marks["model"].event)
        with self._device.use(self._compute):
            batch.marks["begun"] = self._clock.mark()
            # The latest batch is in work: its update was not in the shared model yet.
            missing = (place - 1) % self._num_places if self._begun else None
            for run in self._runs:
                run.take(place, missing)
            self._taken = self._compute.record()
            self._marks.watch(batch.step is not None)
            loss = loss_of(self._model, batch.samples, self._learning)
            batch.marks["forward"] = self._clock.mark()
            loss.backward()
            batch.marks["backward"] = self._clock.mark()
            batch.borders = self._marks.forward, self._marks.backward
            self._update(loss.detach(), place, rate)
            batch.marks["step"] = self._clock.mark()

    def _update(self, loss: Tensor, place: int, rate: float) -> None:
        """Update the replica, or its optimizer alone, with nothing, if the loss is not finite."""
        is_lost = loss.isfinite().logical_not()
        clear_gradients(self._optimizer.parameters, is_lost)
        self._optimizer.step(rate)
        for run in self._runs:
            run.keep_change(place, is_lost)
        self._losses[place].copy_(loss)

    def _copy_out(self, batch: _Batch, place: int) -> None:
        self._out.wait_stream(self._compute)
        with self._device.use(self._out):
            batch.marks["copying_out"] = self._clock.mark()
            for run in self._runs:
                run.updates[place].copy_(run.changes[place], non_blocking=True)
            self._losses_here[place].copy_(self._losses[place], non_blocking=True)
            batch.marks["update"] = self._clock.mark()

    def finish(self) -> BatchResult:
        """Add the update of the oldest batch to the shared model, once it has arrived."""
        batch, place = self._begun.popleft(), self._num_finished % self._num_places
        self._num_finished += 1
        batch.marks["update"].event.synchronize()
        for later in self._begun:
            # Its copy of the model is to be without this update, which the device adds.
            later.marks["model"].event.synchronize()
        loss = float(self._losses_here[place])
        added_ns = time.monotonic_ns()
        if isfinite(loss):
            self._add(place)
        return self._result(batch, loss, added_ns, time.monotonic_ns())

    def _add(self, place: int) -> None:
        pieces = [piece for run in self._runs for piece in run.pieces(place, self._threads)]
        for added in [self._adders.submit(one.add_, update) for one, update in pieces]:
            added.result()

    def _result(self, batch: _Batch, loss: float, added_ns: int, ended_ns: int) -> BatchResult:
        names, marks = list(batch.marks), list(batch.marks.values())
        times = dict(zip(names, self._clock.seconds(marks), strict=True))
        times["adding"] = max(added_ns * _NS, times["update"])
        times["end"] = max(ended_ns * _NS, times["adding"])
        if batch.step is not None:
            self._trace(batch.step, batch, times)
        keys = ("copying", "model", "begun", "forward", "backward", "step", "end")
        return BatchResult(1, loss * batch.size, *(round(times[key] / _NS) for key in keys))

    def _trace(self, step: int, batch: _Batch, times: Mapping[str, float]) -> None:
        worker, device = self._worker, f"gpu{self._worker}"
        lane, to_gpu = compute_lane(device), Resource(device, Lane.H2D)
        exchange = exchange_lane(device)
        borders = [in_seconds(one, self._clock) for one in batch.borders]
        begun_s, forward_s, backward_s = times["begun"], times["forward"], times["backward"]
        phases = (
            Phase(Kind.FORWARD, begun_s, forward_s, forward_s, borders[0]),
            Phase(Kind.BACKWARD, forward_s, backward_s, backward_s, borders[1]),
        )

        def span(kind: Kind, part: str, first: str, last: str, *on: Resource) -> Span:
            start_s, end_s = times[first], times[last]
            return Span(kind, step, part, worker, on, start_s, end_s, num_samples=batch.size)

        self.spans += [
            span(Kind.H2D, "batch", "start", "samples", to_gpu),
            span(Kind.H2D, MODEL, "copying", "model", to_gpu, exchange),
            *layer_spans(step, worker, lane, self._marks.names, phases),
            span(Kind.STEP, "", "backward", "step", lane),
            span(Kind.D2H, "update", "copying_out", "update", Resource(device, Lane.D2H)),
            span(Kind.REDUCE, "update", "adding", "end", exchange, Resource(HOST, Lane.REDUCE)),
        ]


@torch.no_grad()
def clear_gradients(parameters: Sequence[nn.Parameter], where: Tensor) -> None:
    """Set all gradients to zero if the tensor () says so, without asking it on the host."""
    for parameter in parameters:
        if (gradient := parameter.grad) is not None:
            values = gradient._values() if gradient.is_sparse else gradient
            values.masked_fill_(where, 0)
