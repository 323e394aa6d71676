"""The replica of a CPU worker, and functions that CPU and GPU workers share."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.cost import compute_lane
from paceline.core.error_lines import blamed
from paceline.core.errors import InvalidInput
from paceline.core.machine import DeviceKind
from paceline.core.plan import Kind
from paceline.core.timeline import Span
from paceline.exchange.step import Learning, Share
from paceline.links.clock import Clock
from paceline.links.devices import Device, device_of, gpus
from paceline.record.recorder import LayerMarks, Phase, layer_spans
from paceline.strategies.hogbatch.config import WorkerSpec
from paceline.strategies.hogbatch.dense_thread import DenseThread
from paceline.strategies.hogbatch.messages import BatchResult
from paceline.training.data.batch import Batch
from paceline.training.data.dataset import IndexedSamples, Read, reader_of
from paceline.training.models.layers import layers_of
from paceline.training.recipes.recipe import OptimizerFactory, Recipe, described

_NS = 1e-9
_Result = tuple[float, list[int]]


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a model by name; tied parameters appear once.

    The tensors are sorted by dtype, so that a GPU can copy and add all tensors of a dtype as one.
    """
    named: list[tuple[str, Tensor]] = [*model.named_parameters(), *model.named_buffers()]
    return dict(sorted(named, key=lambda item: str(item[1].dtype)))


def device_for(spec: WorkerSpec) -> Device:
    """Return a worker's device; raise InvalidInput if this machine lacks the device."""
    if spec.kind == DeviceKind.CPU:
        return device_of(torch.device("cpu"))
    found = gpus()
    if spec.index >= len(found):
        raise InvalidInput("workers", f"this machine has only {len(found)} GPUs", got=str(spec))
    return device_of(found[spec.index])


def refer(model: nn.Module, shared: Mapping[str, Tensor]) -> nn.Module:
    """Point the model's parameters and buffers to the `shared` tensors; return the model."""
    for name, tensor in tensors_of(model).items():
        tensor.data = shared[name]
    return model


class Learner:
    """A model and its optimizer; `read(rows)` returns the samples of a batch."""

    def __init__(
        self, model: nn.Module, make: OptimizerFactory, learning: Learning, read: Read
    ) -> None:
        self.model, self.learning, self.read = model.train(), learning, read
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = make(self.parameters)
        self._rates = [group["lr"] for group in self.optimizer.param_groups]

    def loss(self, batch: Batch) -> Tensor:
        """Return the mean loss of a batch; raise InvalidInput if the model or the loss fails."""

        def blaming(*args: Any, **fields: Any) -> Any:
            try:
                return self.model(*args, **fields)
            except Exception as error:
                problem = f"forward fails on a batch, {described(batch.inputs)}: {blamed(error)}"
                raise InvalidInput("model", problem, got=self.learning.name) from error

        return self.learning.forward(blaming, Share(*batch, 1.0))

    def set_rate(self, rate: float) -> None:
        """Set each parameter group's learning rate to `rate` times its configured learning rate."""
        for group, own in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = own * rate

    def step(self) -> None:
        """Clip gradients, update the parameters, and clear gradients."""
        self.learning.update(self.optimizer)


class _Thread:
    """A thread that trains the shared parameters with its own gradients.

    After each phase the thread waits, as if its device were `slow` times slower.
    """

    def __init__(self, learner: Learner, samples: IndexedSamples, slow: float) -> None:
        self._learner, self._slow = learner, slow
        self._owed_ns = 0.0  # time still to wait; negative after a wait that was too long
        own = learner.model, samples, learner.optimizer, learner.learning
        self._dense = DenseThread.of(*own)

    def train(self, rows: Tensor, rate: float, started_ns: int, traced: bool) -> _Result:
        """Train on a part of a batch; if `traced`, use PyTorch, whose hooks record the layers.

        Returns the sum of the losses, and a list of times in ns. The list begins with the batch's
        start. Then forward, backward and step have two times each: the end of the phase, and the
        end of the simulated wait after it. Only forward runs if the loss is not finite.
        """
        self._learner.set_rate(rate)
        value, backward, step = self._forward(rows, traced)
        times_ns = [started_ns, *self._wait(started_ns)]
        if isfinite(value):
            backward()
            times_ns += self._wait(times_ns[-1])
            step()
            del backward  # free the graph now, so that this is part of the step's time
            times_ns += self._wait(times_ns[-1])
        return value * len(rows), times_ns

    def _forward(
        self, rows: Tensor, traced: bool
    ) -> tuple[float, Callable[[], object], Callable[[], None]]:
        """Run the forward pass; return the mean loss, and functions for backward pass and step."""
        if self._dense is not None and not traced:
            value = self._dense.forward(rows)
            if isfinite(value):
                return value, self._dense.backward, self._dense.step
        loss = self._learner.loss(Batch.of(self._learner.read(rows)))
        return float(loss.detach()), loss.backward, self._learner.step

    def _wait(self, since_ns: int) -> tuple[int, int]:
        """Wait for `slow` - 1 times the time since `since_ns`; return the wait's begin and end."""
        now = time.monotonic_ns()
        if self._slow == 1:
            return now, now
        self._owed_ns += (self._slow - 1) * (now - since_ns)
        if self._owed_ns > 0:
            time.sleep(self._owed_ns * _NS)
        after = time.monotonic_ns()
        self._owed_ns -= after - now
        return now, after


class CpuReplica:
    """Trains the shared model with the threads of a CPU worker.

    Each thread computes the gradient of its part of a batch, and updates the model in place,
    without locks: Hogwild inside the batch (section V). Each thread has a model whose tensors are
    those of `shared`, and its own optimizer state and gradients, which it clips separately. A
    batch's trace shows the layers of the first thread, and ends when the last thread ends.
    `optimizers`: the optimizers of all threads.
    """

    def __init__(
        self,
        recipe: Recipe,
        shared: Mapping[str, Tensor],
        make: OptimizerFactory,
        learning: Learning,
        worker: int,
        spec: WorkerSpec,
    ) -> None:
        own = make, learning, reader_of(recipe.samples)
        learners = [Learner(refer(recipe.model(), shared), *own) for _ in range(spec.threads)]
        self.optimizers = [one.optimizer for one in learners]
        self._threads = [_Thread(one, recipe.samples, spec.slow) for one in learners]
        self._others = ThreadPoolExecutor(max(1, spec.threads - 1))  # starts threads when needed
        self._marks = LayerMarks(layers_of(learners[0].model), Clock())
        self._worker = worker
        self.spans: list[Span] = []

    def take(self, rows: Tensor, rate: float, step: int | None) -> Iterable[BatchResult]:
        """Train on a batch; return a tuple with the batch's result as its only element."""
        return (self.train(rows, rate, step),)

    def done(self, *, waits: bool = False) -> Iterable[BatchResult]:
        """Return no results, because every batch ends in `take`."""
        return ()

    def train(self, rows: Tensor, rate: float, step: int | None) -> BatchResult:
        """Train on a batch (`ExecuteWork`) in all threads; one with a NaN loss updates nothing."""
        started_ns = time.monotonic_ns()
        self._marks.watch(step is not None)
        losses, times_ns = zip(*self._in_parts(rows, rate, started_ns, step), strict=True)
        ended_ns = max(own_ns[-1] for own_ns in times_ns)
        if step is not None and isfinite(losses[0]):
            self._trace(step, len(rows), times_ns[0], ended_ns)
        return BatchResult(sum(losses), started_ns, started_ns, ended_ns, ended_ns)

    def _in_parts(
        self, rows: Tensor, rate: float, started_ns: int, step: int | None
    ) -> list[_Result]:
        def train(thread: _Thread, part: Tensor) -> _Result:
            return thread.train(part, rate * (len(part) / len(rows)), started_ns, step is not None)

        if len(self._threads) == 1:
            return [train(self._threads[0], rows)]
        cut = rows.tensor_split(min(len(self._threads), len(rows)))
        beside = self._others.map(train, self._threads[1:], cut[1:])
        return [train(self._threads[0], cut[0]), *beside]

    def _trace(self, step: int, size: int, times_ns: Sequence[int], ended_ns: int) -> None:
        """Record a batch's spans; `times_ns`: the times of the first thread."""
        worker, lane = self._worker, compute_lane(f"cpu{self._worker}")
        forward, backward = self._marks.seconds()
        start_s, computed_s, forward_s, passed_s, backward_s, *_ = (ns * _NS for ns in times_ns)
        phases = (
            Phase(Kind.FORWARD, start_s, computed_s, forward_s, forward),
            Phase(Kind.BACKWARD, forward_s, passed_s, backward_s, backward),
        )
        self.spans += layer_spans(step, worker, lane, self._marks.names, phases)
        self.spans.append(
            Span(Kind.STEP, step, "", worker, (lane,), backward_s, ended_ns * _NS, num_samples=size)
        )
