"""What a rank trains or rehearses, and the loop of the synchronous strategies: epochs and tests."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, pairwise, repeat
from math import isfinite
from typing import NamedTuple

import torch
from torch import Tensor, nn

from paceline.core.cost import LayerTimes
from paceline.core.errors import InvalidInput
from paceline.core.outcome import Epoch
from paceline.core.plan import Kind
from paceline.core.settings import RehearseSettings, TrainSettings
from paceline.core.timeline import Span
from paceline.core.workload import Workload
from paceline.data import BalancedSampler, ShardedBatches, loader
from paceline.data.dataset import Batch, Dataset, IndexedSamples
from paceline.exchange.replica import ModelReplica
from paceline.exchange.session import TrainingSession
from paceline.links.group import Group
from paceline.models import describe, find
from paceline.models.factory import fitted, workload_of
from paceline.models.objective import objective_for, objective_of
from paceline.models.paced import PacedModel, PacedSGD
from paceline.recipes.optimizers import optimizer_for
from paceline.record.merge import ClockOffset, clock_offset
from paceline.record.recorder import Recorder

NUM_TRACED = 20
NUM_WARM_UP = 2
_FEWEST_STEPS = NUM_WARM_UP + 3  # one is measured; two are traced, which show a period
_TEST_BATCH = 256


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent with momentum."""

    learning_rate: float = 0.01
    momentum: float = 0.9

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return a new optimizer of the model's parameters."""
        return torch.optim.SGD(model.parameters(), self.learning_rate, self.momentum)


# Weights must not run away in steps that learn nothing: NaNs and denormals compute at other speeds.
_IDLE_SGD = SGD(learning_rate=1e-6)


class Share(NamedTuple):
    """A rank's part of a step's batch.

    `weight` scales the mean loss of this rank's samples, so that the average of all ranks'
    gradients is the gradient of the mean loss of the whole step, however unequal the parts are.
    """

    inputs: Tensor
    targets: Tensor
    weight: float


def shares(
    batches: ShardedBatches | BalancedSampler, data: Iterable[Batch], device: torch.device
) -> Iterator[Share]:
    """Yield this rank's part of each step of an epoch, on `device`."""
    for (inputs, targets), whole in zip(data, batches.global_sizes, strict=True):
        weight = len(targets) * batches.world_size / whole
        yield Share(
            inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True), weight
        )


def train_step(
    model: Callable[[Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    source: Iterator[Share],
    recorder: Recorder,
) -> Tensor:
    """Load, go forward and backward, update the weights; return the weighted loss."""
    with recorder.phase(Kind.LOAD):
        share = next(source)
    with recorder.phase(Kind.FORWARD):
        objective = objective_for(share.targets)
        reduction = "mean" if len(share.targets) else "sum"  # no samples have no mean
        outputs = model(share.inputs)
        loss = objective.loss(outputs, share.targets, reduction=reduction) * share.weight
    with recorder.phase(Kind.BACKWARD):
        loss.backward()
    with recorder.phase(Kind.STEP):
        optimizer.step()
        optimizer.zero_grad()
    recorder.end_step()
    return loss.detach()


@dataclass(frozen=True)
class TrainingSetup:
    """A rank's model, and the steps that are taken with it.

    `workload` describes the rank's part of a step. `source` yields this rank's share of each step
    of an epoch, of which there are `epoch_steps`. `test`: the samples that epochs are tested with,
    None if nothing is learnt. `sampler`: the balanced parts of a batch, if they follow the ranks'
    speeds. `times`: of the layers, where they are paced. `factor`: by how much they are stretched.
    """

    model: nn.Module
    workload: Workload
    source: Callable[[int], Iterator[Share]]
    epoch_steps: tuple[int, ...]
    samples_per_step: float
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    learning_rate: float | None  # None: the optimizer's own
    score: str = "accuracy"
    test: IndexedSamples | None = None
    sampler: BalancedSampler | None = None
    times: LayerTimes | None = None
    factor: float | None = None


def setup_of(session: TrainingSession) -> TrainingSetup:
    """Build what this rank trains or rehearses; InvalidInput if model, data or workers misfit."""
    settings, group = session.settings, session.group
    check_world_size(settings.workers, group)
    if isinstance(settings, TrainSettings):
        return _real(settings, group)
    size = -(-settings.batch_size // group.world_size)
    workload = workload_of(settings.model, size, settings.input_shape)
    if session.device is None:
        return _stretched(settings, group, workload)
    times = session.device.times(workload)
    # One sample of one class: its loss takes no time, and paced layers do not read it.
    share = Share(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64), 1.0)
    return TrainingSetup(
        model=PacedModel(workload, *times),
        workload=workload,
        source=lambda epoch: repeat(share),
        epoch_steps=rehearsed_steps(settings),
        samples_per_step=settings.batch_size,
        optimizer=lambda model: PacedSGD(model.parameters(), times.update_s),
        learning_rate=0.0,
        times=times,
    )


def check_world_size(workers: int | str, group: Group) -> None:
    """Raise InvalidInput if there are not as many ranks as workers were asked for."""
    if group.world_size != workers:
        raise InvalidInput(f"workers: {workers} asked for, {group.world_size} started")


def _real(settings: TrainSettings, group: Group) -> TrainingSetup:
    make = optimizer_for(settings)
    model, data, *_ = fitted(settings.model, settings.data, settings.seed)
    balanced = settings.balance is not None
    batches = share_batches(data, settings.batch_size, settings.seed, group, balanced)
    size = -(-settings.batch_size // group.world_size)
    workload = describe(model, torch.zeros(size, *data.sample_shape), settings.model)
    return TrainingSetup(
        model=model.to(group.device),
        workload=workload,
        source=epochs_of(batches, data.train, group.device),
        epoch_steps=(len(batches),) * settings.epochs,
        samples_per_step=len(data.train) / len(batches),
        optimizer=lambda model: make(model.parameters()),
        learning_rate=settings.learning_rate,
        score=objective_of(data).name,
        test=data.test,
        sampler=batches if isinstance(batches, BalancedSampler) else None,
    )


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


def epochs_of(
    batches: ShardedBatches | BalancedSampler, samples: IndexedSamples, device: torch.device
) -> Callable[[int], Iterator[Share]]:
    """Return a function that begins an epoch and yields this rank's share of each of its steps."""
    data = loader(samples, batches)

    def source(epoch: int) -> Iterator[Share]:
        batches.set_epoch(epoch)
        return shares(batches, data, device)

    return source


def rehearsed_steps(settings: RehearseSettings) -> tuple[int, int]:
    """Return the steps of the two parts of a rehearsal: those that are timed, and the traced."""
    return NUM_WARM_UP + settings.steps, NUM_WARM_UP + min(settings.steps, NUM_TRACED)


def _stretched(settings: RehearseSettings, group: Group, workload: Workload) -> TrainingSetup:
    architecture = find(settings.model)
    torch.manual_seed(0)
    model = architecture.build(None).train()
    shape = settings.input_shape or architecture.input_shape
    assert shape is not None  # or the workload would not be known
    size, sampler = workload.batch_size, None
    if settings.balance is not None:
        size = settings.batch_size
        sampler = BalancedSampler(size, size, group.rank, group.world_size)
    inputs = torch.randn(size, *shape)
    with torch.no_grad():
        outputs = model.eval()(inputs[:1])
    model.train()
    if not isinstance(outputs, torch.Tensor) or outputs.ndim != 2:
        found = getattr(outputs, "shape", type(outputs).__name__)
        raise InvalidInput(f"model {settings.model}: gives {found}, but must give (batch, classes)")
    targets = torch.randint(outputs.shape[1], (size,))

    def source(epoch: int) -> Iterator[Share]:
        if sampler is None:
            return repeat(Share(inputs, targets, 1.0))
        per_sample = group.world_size / size
        sizes = map(len, chain.from_iterable(repeat(sampler)))
        return (Share(inputs[:n], targets[:n], n * per_sample) for n in sizes)

    return TrainingSetup(
        model=model,
        workload=workload,
        source=source,
        epoch_steps=rehearsed_steps(settings),
        samples_per_step=settings.batch_size,
        optimizer=_IDLE_SGD.optimizer,
        learning_rate=_IDLE_SGD.learning_rate,
        sampler=sampler,
        factor=settings.stretch_of(group.rank),
    )


@dataclass(frozen=True)
class Trained:
    """The epochs of a training, this rank's traced spans, and its steps' seconds.

    `offset`: the offset of this rank's clock when the spans were recorded.
    """

    epochs: tuple[Epoch, ...]
    spans: tuple[Span, ...]
    offset: ClockOffset
    step_seconds: tuple[float, ...]


@dataclass(frozen=True)
class Learner:
    """The steps and tests of a run in which a rank does not have the whole model.

    `traced`: the module whose layers the recorder watches. `step` takes a step, records it, and
    returns this rank's weighted loss. `test` returns the summed loss and the number of right
    answers on this rank's share of the samples.
    """

    traced: nn.Module
    step: Callable[[Iterator[Share]], Tensor]
    test: Callable[[IndexedSamples], tuple[float, int]]


def train(
    session: TrainingSession,
    setup: TrainingSetup,
    recorder: Recorder,
    replica: ModelReplica,
    learner: Learner | None = None,
) -> Trained:
    """Train the model as `replica` of it exchanges its gradients, and close the replica.

    A `learner` takes the steps in its own way, with as much of the model as `replica` has.

    The last steps of the second epoch (of the only one, if there is one) are traced, and only for
    that epoch the replica gets a recorder. `step_seconds` are those of the other epochs, without
    each one's first steps; of the untraced steps, if there is one epoch. InvalidInput names the
    learning rate if a loss is not finite.
    """
    group, progress = session.group, session.progress
    progress.begin(sum(setup.epoch_steps), "steps")
    learner = learner or _whole(setup, group, recorder, replica)
    num_epochs = len(setup.epoch_steps)
    traced = traced_epoch(num_epochs)
    untraced = num_untraced(setup.epoch_steps[traced], num_epochs)
    epochs, seconds = list[Epoch](), list[float]()
    for number, num_steps in enumerate(setup.epoch_steps):
        # Recording costs time: only the traced epoch has a recorder.
        if number in (traced, traced + 1):
            replica.record(recorder if number == traced else None)
        started = time.monotonic()
        setup.model.train()
        source, total = setup.source(number), torch.zeros((), device=group.device)
        for step in range(num_steps):
            if (number, step) == (traced, untraced):
                recorder.start_trace(learner.traced)
            total += learner.step(source)
            progress.advance()
        recorder.stop_trace()
        loss = float(total)  # waits for the device
        ends = recorder.step_ends()
        if number == traced:
            ends = ends[:untraced] if num_epochs == 1 else []
            spans, offset = tuple(recorder.spans()), clock_offset(group)
        seconds += [end - start for start, end in pairwise(ends[NUM_WARM_UP - 1 :])]
        if setup.test is not None:
            loss /= num_steps * group.world_size
            took_s = time.monotonic() - started
            # Each rank tests its share of the samples.
            rows = group.gather([loss, *learner.test(setup.test)])
            train_loss, test_loss, correct = (sum(column) for column in zip(*rows, strict=True))
            size = len(setup.test)
            epoch = Epoch(number, train_loss, test_loss / size, correct / size, took_s)
            if not (isfinite(epoch.train_loss) and isfinite(epoch.test_loss)):
                rate = "" if setup.learning_rate is None else f"with {setup.learning_rate:g} "
                raise InvalidInput(
                    f"learning_rate: {rate}the training loss is "
                    f"{epoch.train_loss} and the test loss {epoch.test_loss} after epoch "
                    f"{number + 1}; choose a smaller one"
                )
            epochs.append(epoch)
            progress.epoch(epoch, setup.score)
    replica.close()
    return Trained(tuple(epochs), spans, offset, tuple(seconds))


def _whole(
    setup: TrainingSetup, group: Group, recorder: Recorder, replica: ModelReplica
) -> Learner:
    model, optimizer = setup.model, setup.optimizer(setup.model)

    def step(source: Iterator[Share]) -> Tensor:
        return train_step(replica, optimizer, source, recorder)

    def test(samples: IndexedSamples) -> tuple[float, int]:
        # Running statistics differ between ranks, so broadcast rank 0's: all test the same model.
        group.broadcast(model.buffers())
        return evaluate(model, samples, group)

    return Learner(model, step, test)


def traced_epoch(num_epochs: int) -> int:
    """Return the epoch, counted from zero, whose last steps are traced."""
    return min(1, num_epochs - 1)


def num_untraced(num_steps: int, num_epochs: int) -> int:
    """Return the number of steps of an epoch before the traced ones.

    An only epoch keeps half of its steps to be measured.
    """
    steady = num_steps - NUM_WARM_UP
    return num_steps - min(NUM_TRACED, steady if num_epochs > 1 else max(2, steady // 2))


@torch.no_grad()
def evaluate(model: nn.Module, samples: IndexedSamples, group: Group) -> tuple[float, int]:
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
