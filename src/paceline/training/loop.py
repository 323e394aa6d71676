"""The loop of the synchronous strategies: epochs of steps, each followed by a test."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from typing import Protocol

import torch
from torch import nn

from paceline.core.errors import InvalidInput
from paceline.core.timeline import Span
from paceline.data.balanced import BalancedSampler
from paceline.data.dataset import Dataset, Samples, loader
from paceline.data.sampler import ShardedBatches
from paceline.exchange.balanced import Balanced
from paceline.exchange.replica import Replica
from paceline.links.group import Group
from paceline.record.merge import ClockOffset, clock_offset
from paceline.record.recorder import Recorder
from paceline.training.objective import objective_for
from paceline.training.step import SGD, Share, shares, train_step

_MOST_TRACED = 20
_NUM_WARM_UP = 2
_FEWEST_STEPS = _NUM_WARM_UP + 3  # one to be measured, and two that are traced, for a period
_TEST_BATCH = 256


@dataclass(frozen=True)
class Epoch:
    """What an epoch achieved: mean training loss, and loss and accuracy on the test samples.

    With several labels a sample, `accuracy` is the precision@1; see `training.objective`.
    """

    number: int
    train_loss: float
    test_loss: float
    accuracy: float
    seconds: float


@dataclass(frozen=True)
class Job:
    """All that a strategy's runner needs on one rank.

    `batches` are this rank's share of the training samples, which may follow its speed. `report` is
    called after each epoch, `advance` after each step.
    """

    model: nn.Module
    data: Dataset
    batches: ShardedBatches | BalancedSampler
    epochs: int
    sgd: SGD
    group: Group
    recorder: Recorder
    report: Callable[[Epoch], None]
    advance: Callable[[], None]


@dataclass(frozen=True)
class Outcome:
    """What a runner returns: the epochs, this rank's traced spans, and its steps' seconds.

    `offset` is that of this rank's clock when the spans were recorded.
    """

    epochs: tuple[Epoch, ...]
    spans: tuple[Span, ...]
    offset: ClockOffset
    step_seconds: tuple[float, ...]


class Learner(Protocol):
    """What takes the steps and the tests of a run, where that is no whole model on each rank."""

    @property
    def traced(self) -> nn.Module:
        """The module whose layers the recorder watches."""
        ...

    def step(self, source: Iterator[Share]) -> torch.Tensor:
        """Take a step, and note it in the job's recorder; return this rank's weighted loss."""
        ...

    def test(self) -> tuple[float, int]:
        """Return the summed loss and the number of right answers on this rank's test samples."""
        ...


@dataclass(frozen=True)
class _Whole:
    """A learner with the whole model, as `replica`."""

    job: Job
    replica: Replica
    optimizer: torch.optim.Optimizer

    @property
    def traced(self) -> nn.Module:
        return self.job.model

    def step(self, source: Iterator[Share]) -> torch.Tensor:
        return train_step(self.replica, self.optimizer, source, self.job.recorder)

    def test(self) -> tuple[float, int]:
        # Each rank has running statistics of its own samples: all test the model that rank 0 has.
        self.job.group.broadcast(self.job.model.buffers())
        return evaluate(self.job.model, self.job.data.test, self.job.group)


def share_batches(
    data: Dataset, batch_size: int, seed: int, group: Group, balanced: bool = False
) -> ShardedBatches | BalancedSampler:
    """Return this rank's share of the training samples; `batch_size` is that of all ranks.

    InvalidInput if an epoch has too few steps to be measured.
    """
    num_samples = len(data.train)
    kind = BalancedSampler if balanced else ShardedBatches
    batches = kind(num_samples, batch_size, group.rank, group.world_size, seed)
    if len(batches) < _FEWEST_STEPS:
        raise InvalidInput(
            f"batch_size: {batch_size} makes {len(batches)} steps of {num_samples} samples; "
            f"an epoch needs at least {_FEWEST_STEPS} to be measured"
        )
    return batches


def train(job: Job, replica: Replica, learner: Learner | None = None) -> Outcome:
    """Train the job's model as `replica` of it exchanges its gradients, and close the replica.

    A `learner` takes the steps in its own way, with as much of the model as `replica` has.

    The last steps of the second epoch (of the only one, if there is one) are traced, and only for
    that epoch the replica gets a recorder. `step_seconds` are those of the other epochs, without
    each one's first steps; of the untraced steps, if there is one epoch.
    """
    batches = job.batches
    if isinstance(batches, BalancedSampler):
        replica = Balanced(replica, job.model, job.group, batches, weighs=False)
    if learner is None:
        learner = _Whole(job, replica, job.sgd.optimizer(job.model))
    data = loader(job.data.train, batches)
    traced = traced_epoch(job.epochs)
    untraced = num_untraced(len(batches), job.epochs)
    epochs: list[Epoch] = []
    seconds: list[float] = []
    for number in range(job.epochs):
        if number in (traced, traced + 1):
            replica.record(job.recorder if number == traced else None)
        started = time.monotonic()
        batches.set_epoch(number)
        job.model.train()
        source = shares(batches, data, job.group.device)
        loss = _steps(job, learner, source, untraced if number == traced else None)
        ends = job.recorder.step_ends()
        if number == traced:
            ends = ends[:untraced] if job.epochs == 1 else []
            spans, offset = tuple(job.recorder.spans()), clock_offset(job.group)
        seconds += [end - start for start, end in pairwise(ends[_NUM_WARM_UP - 1 :])]
        loss /= len(batches) * job.group.world_size
        epochs.append(_test(job, learner, number, loss, time.monotonic() - started))
        _check_finite(epochs[-1], job.sgd)
        job.report(epochs[-1])
    replica.close()
    return Outcome(tuple(epochs), spans, offset, tuple(seconds))


def traced_epoch(num_epochs: int) -> int:
    """Return the epoch, counted from zero, whose last steps are traced."""
    return min(1, num_epochs - 1)


def num_untraced(num_steps: int, num_epochs: int) -> int:
    """Return how many steps of an epoch come before the traced ones.

    An only epoch keeps half of its steps to be measured.
    """
    steady = num_steps - _NUM_WARM_UP
    return num_steps - min(_MOST_TRACED, steady if num_epochs > 1 else max(2, steady // 2))


def _check_finite(epoch: Epoch, sgd: SGD) -> None:
    if not (isfinite(epoch.train_loss) and isfinite(epoch.test_loss)):
        raise InvalidInput(
            f"learning_rate: with {sgd.learning_rate:g} the training loss is {epoch.train_loss} "
            f"and the test loss {epoch.test_loss} after epoch {epoch.number + 1}; "
            "choose a smaller one"
        )


def _steps(job: Job, learner: Learner, source: Iterator[Share], first_traced: int | None) -> float:
    """Take all steps of an epoch and return the sum of this rank's weighted losses."""
    total = torch.zeros((), device=job.group.device)
    for step in range(len(job.batches)):
        if step == first_traced:
            job.recorder.start_trace(learner.traced)
        total += learner.step(source)
        job.advance()
    job.recorder.stop_trace()
    return float(total)


def _test(job: Job, learner: Learner, number: int, own_loss: float, seconds: float) -> Epoch:
    """Test each rank's share of the test samples, and bring the sums together."""
    rows = job.group.gather([own_loss, *learner.test()])
    train_loss, test_loss, correct = (sum(column) for column in zip(*rows, strict=True))
    num_samples = len(job.data.test)
    return Epoch(number, train_loss, test_loss / num_samples, correct / num_samples, seconds)


@torch.no_grad()
def evaluate(model: nn.Module, samples: Samples, group: Group) -> tuple[float, int]:
    """Return the summed loss and the number of right answers on this rank's share of the samples.

    Every sample is tested by exactly one rank.
    """
    model.eval()
    loss, correct = 0.0, 0
    own = range(group.rank, len(samples), group.world_size)
    for first in range(0, len(own), _TEST_BATCH):
        inputs, targets = samples.__getitems__(own[first : first + _TEST_BATCH])
        targets = targets.to(group.device)
        outputs, objective = model(inputs.to(group.device)), objective_for(targets)
        loss += float(objective.loss(outputs, targets, reduction="sum"))
        correct += objective.num_right(outputs, targets)
    return loss, correct
