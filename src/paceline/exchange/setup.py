"""Set up a rank's model, steps and optimizer for training or rehearsal."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, repeat

import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.codecs.stand_ins import stand_ins_for
from paceline.core.cost import LayerTimes
from paceline.core.errors import InvalidInput
from paceline.core.settings import RehearseSettings, TrainSettings
from paceline.core.strategy import gradient_codec
from paceline.core.workload import Workload
from paceline.exchange.session import TrainingSession
from paceline.exchange.step import OF_CLASSES, Learning, Optimize, Share, shares
from paceline.links.group import Group
from paceline.training.data import BalancedSampler, ShardedBatches, loader
from paceline.training.data.batch import Batch
from paceline.training.data.dataset import IndexedSamples
from paceline.training.models import describe, find
from paceline.training.models.paced import PacedModel, PacedSGD
from paceline.training.recipes.losses import next_token_loss
from paceline.training.recipes.named import own_recipe, recipe_of, workload_of
from paceline.training.recipes.optimizers import (
    checked_optimizer,
    checked_schedule,
    optimizer_for,
    schedule_of,
)
from paceline.training.recipes.recipe import NAMELESS, OptimizerFactory, Recipe, built

NUM_TRACED = 20
NUM_WARM_UP = 2
# After the warm-up, one step is timed. Then two are traced, because a step's duration is the time
# between the ends of two steps.
FEWEST_STEPS = NUM_WARM_UP + 3

# Learning rate of a rehearsal. It is tiny, so that parameters stay normal numbers: NaNs and
# denormals would change the speed of steps.
_IDLE_RATE = 1e-6


@dataclass(frozen=True)
class TrainingSetup:
    """All that a rank needs to train or rehearse: its model, data, optimizer and options.

    `workload`: layers and costs of the rank's part of a step. `source(epoch, first_step)`: yields
    this rank's batch of each step. `epoch_steps`: number of steps of each epoch.
    `samples_per_step`: number of samples in a step of all ranks, as a mean over steps.
    `evaluate_every`: number of steps between tests. `recipe`: None in a rehearsal. `sampler`: None
    unless batches are balanced. `times`: set if layers sleep for these times instead of computing
    (paced layers). `factor`: in a rehearsal, the factor by which layers are slowed down.
    `first(n)`: returns a batch of n samples; None if layers are paced.
    """

    model: nn.Module
    workload: Workload
    source: Callable[..., Iterator[Share]]
    epoch_steps: tuple[int, ...]
    samples_per_step: float
    optimizer: Optimize
    learning_rate: float | None  # None: the optimizer's default learning rate
    learning: Learning = OF_CLASSES
    schedule: Callable[[Optimizer], LRScheduler | None] = lambda optimizer: None
    recipe: Recipe | None = None
    evaluate_every: int | None = None
    sampler: BalancedSampler | None = None
    times: LayerTimes | None = None
    factor: float | None = None
    first: Callable[[int], Batch] | None = None


def setup_of(session: TrainingSession) -> TrainingSetup:
    """Create this rank's model, data, optimizer and options for a training or rehearsal.

    Raises InvalidInput if model, data or number of workers do not fit. An emulated device makes
    synthetic gradients: of these, codec "threshold:1@0.01", for example, sends 1 % of the values.
    """
    settings, group, device = session.settings, session.group, session.device
    check_world_size(settings.workers, group)
    if isinstance(settings, TrainSettings):
        return _real(settings, group)
    size = -(-settings.batch_size // group.world_size)
    workload = workload_of(settings.model, size, settings.input_shape)
    if device is None:
        return _stretched(settings, group, workload)
    times, like = device.times(workload), stand_ins_for(gradient_codec(session.config))
    # the smallest batch: paced layers do not compute, and the loss should take almost no time
    share = Share(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64), 1.0)
    return TrainingSetup(
        model=PacedModel(workload, times.forward_s, times.backward_s, gradient_like=like),
        workload=workload,
        source=lambda epoch, first_step=0: repeat(share),
        epoch_steps=rehearsed_steps(settings),
        samples_per_step=settings.batch_size,
        optimizer=lambda model: PacedSGD(model.parameters(), times.update_s),
        learning_rate=0.0,
        times=times,
    )


def check_world_size(workers: int | str, group: Group) -> None:
    """Raise InvalidInput if the setting `workers` is not the group's number of ranks."""
    if group.world_size != workers:
        problem = f"must be {group.world_size}, the number of started processes"
        raise InvalidInput("workers", problem, got=workers)


def _real(settings: TrainSettings, group: Group) -> TrainingSetup:
    recipe = recipe_of(settings.model, settings.data, settings.seed)
    model = built(recipe, settings.seed)
    balanced = settings.balance is not None
    sizes = len(recipe.samples), settings.batch_size
    batches = share_batches(*sizes, settings.seed, group, balanced)
    size = -(-settings.batch_size // (group.world_size * settings.accumulate))
    workload = describe(model, recipe.example(size), settings.model)
    workload = replace(workload, num_accumulated=settings.accumulate - 1)
    return trained_setup(settings, recipe, batches, workload, model.to(group.device), group.device)


def trained_setup(
    settings: TrainSettings,
    recipe: Recipe,
    batches: ShardedBatches | BalancedSampler,
    workload: Workload,
    model: nn.Module,
    device: torch.device,
) -> TrainingSetup:
    """Create a rank's training setup; `model`: the recipe's model, or this rank's part of it."""
    steps = epoch_steps(len(batches), settings)
    optimizer, schedule = learning_by(recipe, settings, sum(steps))
    return TrainingSetup(
        model=model,
        workload=workload,
        source=epochs_of(batches, recipe.samples, device),
        epoch_steps=steps,
        samples_per_step=len(recipe.samples) / len(batches),
        optimizer=optimizer,
        learning_rate=settings.learning_rate,
        learning=learning_of(recipe, settings),
        schedule=schedule,
        recipe=recipe,
        evaluate_every=settings.evaluate_every,
        sampler=batches if isinstance(batches, BalancedSampler) else None,
        first=recipe.first,
    )


def optimizer_by(recipe: Recipe, settings: TrainSettings) -> OptimizerFactory:
    """Return the settings' or the recipe's optimizer factory; refuse settings it would ignore."""
    if settings.optimizer is not None or recipe.optimizer is None:
        return optimizer_for(settings)
    for name in ("learning_rate", "momentum"):
        if getattr(settings, name) is not None:
            problem = "requires --optimizer, because the recipe's optimizer sets its own value"
            raise InvalidInput(name, problem)
    return checked_optimizer(recipe.name or NAMELESS, recipe.optimizer)


def learning_by(
    recipe: Recipe, settings: TrainSettings, num_steps: int
) -> tuple[Optimize, Callable[[Optimizer], LRScheduler | None]]:
    """Return functions that create the optimizer of a model, and the optimizer's schedule.

    Settings override the recipe. `num_steps`: number of training steps, for the schedule.
    """
    make = optimizer_by(recipe, settings)

    def optimizer(model: nn.Module) -> Optimizer:
        return make([one for one in model.parameters() if one.requires_grad])

    def schedule(optimizer: Optimizer) -> LRScheduler | None:
        if settings.schedule is None and recipe.schedule is not None:
            return checked_schedule(recipe.name or NAMELESS, recipe.schedule)(optimizer, num_steps)
        name = settings.schedule or "constant"
        if name == "constant" and not settings.warmup_steps:
            return None
        return schedule_of(name, settings.warmup_steps)(optimizer, num_steps)

    return optimizer, schedule


def learning_of(recipe: Recipe, settings: TrainSettings) -> Learning:
    """Return the loss of a recipe, with the training step's options from the settings."""
    is_bfloat16 = settings.precision == "bfloat16"
    return Learning(
        recipe.loss, settings.accumulate, settings.clip_norm, is_bfloat16, recipe.name or NAMELESS
    )


def epoch_steps(num_steps: int, settings: TrainSettings) -> tuple[int, ...]:
    """Return the number of steps of each epoch to train, according to `--steps` or `--epochs`.

    `num_steps`: number of steps of a whole epoch; with `--steps`, the last epoch may have fewer.
    """
    if settings.steps is not None and settings.steps < FEWEST_STEPS:
        raise InvalidInput("steps", f"must be at least {FEWEST_STEPS}", got=settings.steps)
    return epoch_lengths(settings, num_steps)


def epoch_lengths(settings: TrainSettings, whole: int, per_step: int = 1) -> tuple[int, ...]:
    """Return the length of each epoch to train, in steps or samples.

    `whole`: length of a whole epoch; with `--steps`, the last epoch may be shorter. `per_step`:
    length of a step.
    """
    if settings.steps is None:
        return (whole,) * settings.epochs
    count, rest = divmod(settings.steps * per_step, whole)
    return (whole,) * count + ((rest,) if rest else ())


def share_batches(
    num_samples: int, batch_size: int, seed: int, group: Group, balanced: bool = False
) -> ShardedBatches | BalancedSampler:
    """Return this rank's sampler; `batch_size`: number of samples in a step of all ranks."""
    kind = BalancedSampler if balanced else ShardedBatches
    batches = kind(num_samples, batch_size, group.rank, group.world_size, seed)
    if len(batches) < FEWEST_STEPS:
        problem = f"must allow at least {FEWEST_STEPS} steps per epoch of {num_samples} samples"
        raise InvalidInput("batch_size", problem, got=batch_size)
    return batches


def epochs_of(
    batches: ShardedBatches | BalancedSampler, samples: IndexedSamples, device: torch.device
) -> Callable[..., Iterator[Share]]:
    """Return a function `(epoch, first_step=0)` that yields this rank's batch of each step."""
    data = loader(samples, batches)

    def source(epoch: int, first_step: int = 0) -> Iterator[Share]:
        batches.set_epoch(epoch, first_step)
        return shares(batches, data, device)

    return source


def rehearsed_steps(settings: RehearseSettings) -> tuple[int, int]:
    """Return the numbers of steps in a rehearsal's timed epoch and in its traced epoch."""
    return NUM_WARM_UP + settings.steps, NUM_WARM_UP + min(settings.steps, NUM_TRACED)


def _stretched(settings: RehearseSettings, group: Group, workload: Workload) -> TrainingSetup:
    size, sampler = settings.batch_size, None
    if settings.balance is not None:
        sampler = BalancedSampler(size, size, group.rank, group.world_size)
    recipe = own_recipe(settings.model)
    if recipe is not None:
        model, batch, loss = built(recipe, seed=0), recipe.first(size), recipe.loss
    else:
        model, batch = _random(settings, size)
        loss = next_token_loss  # a mean over all targets, which also suits classifiers

    def first(num_samples: int) -> Batch:
        return batch.rows(slice(num_samples))

    def source(epoch: int, first_step: int = 0) -> Iterator[Share]:
        if sampler is None:
            return repeat(Share(*first(workload.batch_size), 1.0))
        per_sample = group.world_size / size
        sizes = map(len, chain.from_iterable(repeat(sampler)))
        return (Share(*first(n), n * per_sample) for n in sizes)

    return TrainingSetup(
        model=model,
        workload=workload,
        source=source,
        epoch_steps=rehearsed_steps(settings),
        samples_per_step=settings.batch_size,
        optimizer=lambda model: SGD(model.parameters(), _IDLE_RATE, momentum=0.9),
        learning_rate=_IDLE_RATE,
        learning=Learning(loss),
        sampler=sampler,
        factor=settings.slowdown_of(group.rank),
        first=first,
    )


def _random(settings: RehearseSettings, size: int) -> tuple[nn.Module, Batch]:
    """Build a model that has no training recipe, and `size` random inputs and targets."""
    architecture = find(settings.model)
    torch.manual_seed(0)
    model = architecture.build(None).eval()
    shape = settings.input_shape or architecture.input_shape
    assert shape is not None  # `workload_of` has raised an error if the shape is unknown
    if architecture.input_dtype.is_floating_point:
        inputs = torch.randn(size, *shape)
    else:
        inputs = torch.randint(architecture.num_classes or 1, (size, *shape))
    with torch.no_grad():
        outputs = model(inputs[:1])
    if not isinstance(outputs, torch.Tensor) or outputs.ndim < 2:
        found = getattr(outputs, "shape", type(outputs).__name__)
        problem = "must return (batch, classes) or (batch, tokens, classes)"
        hint = "or use a recipe that defines a loss"
        raise InvalidInput("model", problem, got=found, hint=hint)
    targets = torch.randint(outputs.shape[-1], (size, *outputs.shape[1:-1]))
    return model.train(), Batch(inputs, targets)
