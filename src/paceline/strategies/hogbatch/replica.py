"""The replicas of workers: the shared model itself on CPU cores, and a copy of it on a GPU."""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from math import isfinite
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline.core.cost import compute_lane, exchange_lane
from paceline.core.plan import Kind, Lane, Resource
from paceline.core.timeline import Span
from paceline.models.factory import OptimizerFactory
from paceline.models.layers import layers_of
from paceline.models.objective import objective_for
from paceline.record.clock import CudaClock, HostClock
from paceline.record.recorder import LayerMarks, Phase, layer_spans
from paceline.strategies.hogbatch.plan import HOST, MODEL
from paceline.strategies.hogbatch.statistics import BatchResult

_NS = 1e-9


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a model by their names, shared ones once."""
    named: dict[str, Tensor] = dict(model.named_parameters())
    return named | dict(model.named_buffers())


def refer(model: nn.Module, shared: Mapping[str, Tensor]) -> nn.Module:
    """Replace the parameters and buffers of the model by the shared ones, and return the model."""
    for name, tensor in tensors_of(model).items():
        tensor.data = shared[name]
    return model


class ScaledOptimizer:
    """An optimizer of a model, of which each step scales the learning rates."""

    def __init__(self, model: nn.Module, make: OptimizerFactory) -> None:
        self._optimizer = make([p for p in model.parameters() if p.requires_grad])
        self._rates = [group["lr"] for group in self._optimizer.param_groups]

    def step(self, rate: float) -> None:
        """Update the parameters with the learning rates times `rate`, and drop the gradients."""
        for group, own in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = own * rate
        self._optimizer.step()
        self._optimizer.zero_grad()


class _ThreadResult(NamedTuple):
    """The result of one thread; `computed_ns` are the ends of its phases before it waited."""

    loss: float
    forward_ns: int
    backward_ns: int
    ended_ns: int
    computed_ns: tuple[int, int]


class _Thread:
    """A thread with the shared model as its parameters, and gradients of its own.

    It waits after each phase, as if its device were `slow` times slower.
    """

    def __init__(
        self, model: nn.Module, make: OptimizerFactory, samples: tuple[Tensor, Tensor], slow: float
    ) -> None:
        self.model = model.train()
        self._optimizer = ScaledOptimizer(model, make)
        self._samples, self._slow = samples, slow
        self._loss = objective_for(samples[1]).loss
        self._owed_ns = 0.0  # below zero after a wait that was too long

    def train(self, rows: Tensor, rate: float, started_ns: int) -> _ThreadResult:
        inputs, targets = (part.index_select(0, rows) for part in self._samples)
        loss = self._loss(self.model(inputs), targets)
        value = float(loss.detach())
        computed_ns = time.monotonic_ns()
        forward_ns = backward_ns = ended_ns = passed_ns = self._wait(started_ns)
        if isfinite(value):
            loss.backward()
            passed_ns = time.monotonic_ns()
            backward_ns = self._wait(forward_ns)
            self._optimizer.step(rate)
            del loss  # freeing the graph takes a while, and belongs to the step
            ended_ns = self._wait(backward_ns)
        ends = (computed_ns, passed_ns)
        return _ThreadResult(value * len(rows), forward_ns, backward_ns, ended_ns, ends)

    def _wait(self, since_ns: int) -> int:
        """Wait in proportion to the time since then, and return the time after the wait."""
        now = time.monotonic_ns()
        if self._slow == 1:
            return now
        self._owed_ns += (self._slow - 1) * (now - since_ns)
        if self._owed_ns > 0:
            time.sleep(self._owed_ns * _NS)
        after = time.monotonic_ns()
        self._owed_ns -= after - now
        return after


class CpuReplica:
    """The threads of a worker on CPU cores compute on the shared model: a reference replica.

    Each thread takes its part of a batch, computes the gradient on the model as it is, and updates
    the model in place, without locks: Hogwild inside the batch (section V). Gradients and the
    optimizer's state are the thread's own.

    `build` makes a model for each thread, whose parameters and buffers become the shared ones. In a
    trace the first thread's layers stand for all; the update ends with that of the last thread.
    `samples` are the inputs and the targets of all samples.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        shared: Mapping[str, Tensor],
        make: OptimizerFactory,
        samples: tuple[Tensor, Tensor],
        worker: int,
        threads: int = 1,
        slow: float = 1.0,
    ) -> None:
        self._threads = [
            _Thread(refer(build(), shared), make, samples, slow) for _ in range(threads)
        ]
        self._others = ThreadPoolExecutor(threads - 1) if threads > 1 else None
        self._marks = LayerMarks(layers_of(self._threads[0].model), HostClock())
        self._worker = worker
        self.spans: list[Span] = []

    def train(self, rows: Tensor, rate: float, step: int | None) -> BatchResult:
        """Train on a part in each thread that gets a sample; each makes its own update.

        The learning rate is `rate` times that of the settings. The batch is traced as `step`, if
        any. With a loss that is not finite, the model is left as it is; on a GPU, too.
        """
        started_ns = time.monotonic_ns()
        self._marks.watch(step is not None)
        parts = self._in_parts(rows, rate, started_ns)
        first, ended_ns = parts[0], max(part.ended_ns for part in parts)
        if step is not None:
            self._trace(step, len(rows), started_ns, first, ended_ns)
        return BatchResult(
            updates=len(parts),
            loss=sum(part.loss for part in parts),
            started_ns=started_ns,
            read_ns=started_ns,  # the model is not copied
            forward_ns=first.forward_ns,
            backward_ns=first.backward_ns,
            stepped_ns=ended_ns,
            ended_ns=ended_ns,
        )

    def _in_parts(self, rows: Tensor, rate: float, started_ns: int) -> list[_ThreadResult]:
        if self._others is None:
            return [self._threads[0].train(rows, rate, started_ns)]
        cut = rows.tensor_split(min(len(self._threads), len(rows)))
        rates = [rate * len(part) / len(rows) for part in cut]
        beside = [
            self._others.submit(thread.train, part, own, started_ns)
            for thread, part, own in zip(self._threads[1:], cut[1:], rates[1:], strict=False)
        ]
        first = self._threads[0].train(cut[0], rates[0], started_ns)
        return [first, *(part.result() for part in beside)]

    def _trace(
        self, step: int, size: int, started_ns: int, part: _ThreadResult, ended_ns: int
    ) -> None:
        worker, lane = self._worker, compute_lane(f"cpu{self._worker}")
        forward, backward = self._marks.seconds()
        moments = (started_ns, part.forward_ns, part.backward_ns, ended_ns, *part.computed_ns)
        start_s, forward_s, backward_s, end_s, computed_s, passed_s = (ns * _NS for ns in moments)
        phases = (
            Phase(Kind.FORWARD, start_s, computed_s, forward_s, forward),
            Phase(Kind.BACKWARD, forward_s, passed_s, backward_s, backward),
        )
        self.spans += layer_spans(step, worker, lane, self._marks.names, phases)
        self.spans.append(
            Span(Kind.STEP, step, "", worker, (lane,), backward_s, end_s, num_samples=size)
        )


class CudaReplica:
    """A copy of the shared model on a GPU, whose update is pushed into it (section VI-B).

    One stream copies batch and model to the device, the default stream computes, and a third copies
    the update back. The host then adds it to the model as it is by then: other workers have changed
    it meanwhile, and no worker waits for another. Host memory is pinned, so that copies are
    asynchronous. `samples` are the inputs and targets of all samples.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        shared: Mapping[str, Tensor],
        make: OptimizerFactory,
        samples: tuple[Tensor, Tensor],
        worker: int,
        device: torch.device,
    ) -> None:
        self._device, self._worker, self._samples = device, worker, samples
        self._loss = objective_for(samples[1]).loss
        self._model = build().to(device).train()
        self._optimizer = ScaledOptimizer(self._model, make)
        own = tensors_of(self._model)
        # Updates of bool tensors cannot be added; these stay as they were built.
        names = [name for name, tensor in own.items() if tensor.dtype != torch.bool]
        self._pairs = [(own[name], shared[name]) for name in names]
        self._before = [torch.empty_like(tensor) for tensor, _ in self._pairs]
        self._updates = [torch.empty_like(t, device="cpu").pin_memory() for t, _ in self._pairs]
        self._in, self._out = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._clock = CudaClock()
        self._marks = LayerMarks(layers_of(self._model), self._clock)
        self.spans: list[Span] = []

    def train(self, rows: Tensor, rate: float, step: int | None) -> BatchResult:
        """Copy batch and model in, train as on cores, and add the change to the shared model."""
        self._marks.watch(step is not None)
        marks: dict[str, Any] = {}  # in the order of their times
        inputs, targets = self._copy_in(rows, marks)
        loss = self._loss(self._model(inputs), targets)
        marks["forward"] = self._clock.mark()
        loss.backward()
        marks["backward"] = self._clock.mark()
        self._optimizer.step(rate)
        marks["step"] = self._clock.mark()
        self._copy_out(marks)
        value = float(loss.detach())
        if isfinite(value):
            with torch.no_grad():
                for (_, shared), update in zip(self._pairs, self._updates, strict=True):
                    shared.add_(update)
        ended_s = time.monotonic_ns() * _NS
        times = dict(zip(marks, self._clock.seconds(list(marks.values())), strict=True))
        times["end"] = max(ended_s, times["update"])
        if step is not None:
            self._trace(step, len(rows), times)
        moments = (times[key] for key in ("start", "model", "forward", "backward", "step", "end"))
        return BatchResult(1, value * len(rows), *(round(moment / _NS) for moment in moments))

    def _copy_in(self, rows: Tensor, marks: dict[str, Any]) -> tuple[Tensor, Tensor]:
        current = torch.cuda.current_stream(self._device)
        self._in.wait_stream(current)
        with torch.cuda.stream(self._in), torch.no_grad():
            marks["start"] = self._clock.mark()
            inputs, targets = (
                part.index_select(0, rows).pin_memory().to(self._device, non_blocking=True)
                for part in self._samples
            )
            marks["batch"] = self._clock.mark()
            for (tensor, shared), before in zip(self._pairs, self._before, strict=True):
                tensor.copy_(shared, non_blocking=True)
                before.copy_(tensor)
            marks["model"] = self._clock.mark()
        current.wait_stream(self._in)
        # The allocator of the copying stream must not reuse them while the default stream computes.
        inputs.record_stream(current)
        targets.record_stream(current)
        return inputs, targets

    @torch.no_grad()
    def _copy_out(self, marks: dict[str, Any]) -> None:
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            for (tensor, _), before, update in zip(
                self._pairs, self._before, self._updates, strict=True
            ):
                update.copy_(torch.sub(tensor, before, out=before), non_blocking=True)
            marks["update"] = self._clock.mark()
        self._out.synchronize()  # the host reads the update next

    def _trace(self, step: int, size: int, times: Mapping[str, float]) -> None:
        worker, device = self._worker, f"gpu{self._worker}"
        lane, to_device = compute_lane(device), (Resource(device, Lane.H2D),)
        adding = (exchange_lane(device), Resource(HOST, Lane.REDUCE))
        borders = self._marks.seconds()
        start_s, forward_s, backward_s = times["model"], times["forward"], times["backward"]
        phases = (
            Phase(Kind.FORWARD, start_s, forward_s, forward_s, borders[0]),
            Phase(Kind.BACKWARD, forward_s, backward_s, backward_s, borders[1]),
        )

        def span(kind: Kind, part: str, on: tuple[Resource, ...], first: str, last: str) -> Span:
            start_s, end_s = times[first], times[last]
            return Span(kind, step, part, worker, on, start_s, end_s, num_samples=size)

        self.spans += [
            span(Kind.H2D, "batch", to_device, "start", "batch"),
            span(Kind.H2D, MODEL, to_device, "batch", "model"),
            *layer_spans(step, worker, lane, self._marks.names, phases),
            span(Kind.STEP, "", (lane,), "backward", "step"),
            span(Kind.D2H, "update", (Resource(device, Lane.D2H),), "step", "update"),
            span(Kind.REDUCE, "update", adding, "update", "end"),
        ]


WorkerReplica = CpuReplica | CudaReplica


def median_seconds(
    replica: WorkerReplica, num_samples: int, size: int, seconds: float, fewest: int = 3
) -> float:
    """Return the median seconds of batches of `size`, which are repeated for about `seconds`.

    Two batches before them warm up, and are not counted.
    """
    rows = torch.arange(size) % num_samples
    for _ in range(2):
        replica.train(rows, 1.0, None)
    took: list[float] = []
    while len(took) < fewest or sum(took) < seconds:
        done = replica.train(rows, 1.0, None)
        took.append((done.ended_ns - done.started_ns) * _NS)
    return median(took)
