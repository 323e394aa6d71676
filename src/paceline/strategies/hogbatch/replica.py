"""A worker on cores: it computes on the shared model itself, a reference replica (section V).

Each thread takes its part of a batch, computes the gradient on the model as it is, and updates the
model in place, without locks: Hogwild inside the batch. Gradients and the optimizer's state are the
thread's own.
"""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import isfinite
from statistics import median
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from paceline.core.cost import compute_lane
from paceline.core.plan import Kind, task_name
from paceline.core.timeline import Span
from paceline.models.layers import layers_of
from paceline.record.clock import HostClock
from paceline.record.marks import LayerMarks, Phase, layer_spans
from paceline.strategies.hogbatch.optimizers import Make
from paceline.training.objective import objective_for

_NS = 1e-9


class Samples(NamedTuple):
    """The training samples, in memory that all workers see."""

    inputs: Tensor
    targets: Tensor

    def of(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the samples of these rows."""
        return self.inputs.index_select(0, rows), self.targets.index_select(0, rows)


class Done(NamedTuple):
    """What became of a batch: `loss` is the sum over its samples, times as in ScheduleWork."""

    updates: int
    loss: float
    started_ns: int
    read_ns: int
    forward_ns: int
    backward_ns: int
    stepped_ns: int
    ended_ns: int


class Replica(Protocol):
    """How a worker trains on the shared model."""

    spans: list[Span]

    def train(self, rows: Tensor, rate: float, step: int | None) -> Done:
        """Train on samples with the learning rate times `rate`; trace it as batch `step`.

        With a loss that is not finite, the model is left as it is.
        """
        ...


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a model by their names, shared ones once."""
    named: dict[str, Tensor] = dict(model.named_parameters())
    return named | dict(model.named_buffers())


def refer(model: nn.Module, shared: Mapping[str, Tensor]) -> nn.Module:
    """Have the parameters and buffers of the model be the shared ones, and return the model."""
    for name, tensor in tensors_of(model).items():
        tensor.data = shared[name]
    return model


@dataclass
class _Pace:
    """The waits of a device that is so many times slower."""

    slow: float
    _owed_ns: float = 0.0  # below zero after a wait that was too long

    def wait(self, since_ns: int) -> int:
        """Wait for what was computed since then, and return the time after it."""
        now = time.monotonic_ns()
        if self.slow == 1:
            return now
        self._owed_ns += (self.slow - 1) * (now - since_ns)
        if self._owed_ns > 0:
            time.sleep(self._owed_ns * _NS)
        after = time.monotonic_ns()
        self._owed_ns -= after - now
        return after


class _Part(NamedTuple):
    """What one thread did; `computed_ns` are the ends of its phases before it waited."""

    loss: float
    num_samples: int
    forward_ns: int
    backward_ns: int
    ended_ns: int
    computed_ns: tuple[int, int]


class _Thread:
    """One thread's view of the shared model, with gradients of its own."""

    def __init__(self, model: nn.Module, make: Make, samples: Samples, slow: float) -> None:
        self.model = model.train()
        self._optimizer = make([p for p in model.parameters() if p.requires_grad])
        self._rates = [group["lr"] for group in self._optimizer.param_groups]
        self._samples, self._pace = samples, _Pace(slow)
        self._loss = objective_for(samples.targets).loss

    def train(self, rows: Tensor, rate: float, started_ns: int) -> _Part:
        inputs, targets = self._samples.of(rows)
        loss = self._loss(self.model(inputs), targets)
        value = float(loss.detach())
        computed_ns = time.monotonic_ns()
        forward_ns = backward_ns = ended_ns = self._pace.wait(started_ns)
        passed_ns = forward_ns
        if isfinite(value):
            loss.backward()
            passed_ns = time.monotonic_ns()
            backward_ns = self._pace.wait(forward_ns)
            self._step(rate)
            del loss  # and its graph, which takes a while
            ended_ns = self._pace.wait(backward_ns)
        size = len(rows)
        ends = (computed_ns, passed_ns)
        return _Part(value * size, size, forward_ns, backward_ns, ended_ns, ends)

    def _step(self, rate: float) -> None:
        for group, own in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = own * rate
        self._optimizer.step()
        self._optimizer.zero_grad()


class CpuReplica:
    """The threads of a worker on cores.

    `build` gives a model for each, of which parameters and buffers become the shared ones. The
    first thread's layers stand for all in a trace; an update ends with the last thread's.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        shared: Mapping[str, Tensor],
        make: Make,
        samples: Samples,
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

    def train(self, rows: Tensor, rate: float, step: int | None) -> Done:
        """See `Replica`: a part for each thread that gets a sample, each with its own update."""
        started_ns = time.monotonic_ns()
        self._marks.watch(step is not None)
        parts = self._in_parts(rows, rate, started_ns)
        first, ended_ns = parts[0], max(part.ended_ns for part in parts)
        if step is not None:
            self._trace(step, len(rows), started_ns, first, ended_ns)
        return Done(
            len(parts),
            sum(part.loss for part in parts),
            started_ns,
            started_ns,
            first.forward_ns,
            first.backward_ns,
            ended_ns,
            ended_ns,
        )

    def _in_parts(self, rows: Tensor, rate: float, started_ns: int) -> list[_Part]:
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

    def _trace(self, step: int, size: int, started_ns: int, part: _Part, ended_ns: int) -> None:
        lane = compute_lane(f"cpu{self._worker}")
        forward, backward = self._marks.seconds()
        start_s, forward_s, backward_s, end_s = (
            moment * _NS for moment in (started_ns, part.forward_ns, part.backward_ns, ended_ns)
        )
        computed_s, passed_s = (moment * _NS for moment in part.computed_ns)
        phases = (
            Phase(Kind.FORWARD, start_s, computed_s, forward_s, forward),
            Phase(Kind.BACKWARD, forward_s, passed_s, backward_s, backward),
        )
        self.spans += layer_spans(step, self._worker, lane, self._marks.names, phases)
        name = task_name(step, Kind.STEP, "", self._worker)
        self.spans.append(Span(name, Kind.STEP, (lane,), backward_s, end_s, str(size)))


def median_seconds(
    replica: Replica, num_samples: int, size: int, seconds: float, fewest: int = 3
) -> float:
    """Return what a batch of `size` takes: the median over about `seconds`, after two others."""
    rows = torch.arange(size) % num_samples
    for _ in range(2):
        replica.train(rows, 1.0, None)
    took: list[float] = []
    while len(took) < fewest or sum(took) < seconds:
        done = replica.train(rows, 1.0, None)
        took.append((done.ended_ns - done.started_ns) * _NS)
    return median(took)
