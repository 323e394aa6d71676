"""What a rank trains or rehearses: its model, its part of each step, and how it learns."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, repeat

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.codecs.stand_ins import stand_ins_for
from paceline.core.cost import LayerTimes, PacedDevice
from paceline.core.errors import InvalidInput
from paceline.core.settings import RehearseSettings, TrainSettings
from paceline.core.strategy import gradient_codec
from paceline.core.workload import Workload
from paceline.exchange.session import TrainingSession
from paceline.exchange.step import OF_CLASSES, SGD, Learning, Optimize, Share, shares
from paceline.links.group import Group
from paceline.training.data import BalancedSampler, ShardedBatches, loader
from paceline.training.data.batch import Batch
from paceline.training.data.dataset import IndexedSamples
from paceline.training.models import describe, find
from paceline.training.models.paced import PacedModel, PacedSGD
from paceline.training.recipes.named import own_recipe, recipe_of, workload_of
from paceline.training.recipes.optimizers import OptimizerFactory, checked_optimizer, optimizer_for
from paceline.training.recipes.recipe import NAMELESS, Recipe, built
from paceline.training.recipes.schedules import checked_schedule, schedule_of

NUM_TRACED = 20
NUM_WARM_UP = 2
FEWEST_STEPS = NUM_WARM_UP + 3  # one is measured; two are traced, which show a period

# Weights must not run away in steps that learn nothing: NaNs and denormals compute at other speeds.
_IDLE_SGD = SGD(learning_rate=1e-6)


@dataclass(frozen=True)
class TrainingSetup:
    """A rank's model, and the steps that are taken with it.

    `workload` describes the rank's part of a step. `source(epoch, first_step)` yields this rank's
    share of each step of an epoch, of which there are `epoch_steps`. `recipe` is what is trained,
    None if nothing is learnt. `sampler`: the balanced parts of a batch, if they follow the ranks'
    speeds. `times`: of the layers, where they are paced. `factor`: by how much they are stretched.
    """

    model: nn.Module
    workload: Workload
    source: Callable[..., Iterator[Share]]
    epoch_steps: tuple[int, ...]
    samples_per_step: float
    optimizer: Optimize
    learning_rate: float | None  # None: the optimizer's own
    learning: Learning = OF_CLASSES
    schedule: Callable[[Optimizer], LRScheduler | None] = lambda optimizer: None
    recipe: Recipe | None = None
    evaluate_every: int | None = None
    sampler: BalancedSampler | None = None
    times: LayerTimes | None = None
    factor: float | None = None


def setup_of(session: TrainingSession) -> TrainingSetup:
    """Build what this rank trains or rehearses; InvalidInput if model, data or workers misfit."""
    codec = gradient_codec(session.config)
    return setup_for(session.settings, session.group, session.device, codec)


def setup_for(
    settings: TrainSettings | RehearseSettings,
    group: Group,
    device: PacedDevice | None,
    codec: str | None = None,
) -> TrainingSetup:
    """Build what a rank of this group trains by these settings, or rehearses as a device.

    A rehearsal's gradients are those of which `codec` sends as much as its name declares. Raises
    InvalidInput if model, data or workers misfit.
    """
    check_world_size(settings.workers, group)
    if isinstance(settings, TrainSettings):
        return _real(settings, group)
    size = -(-settings.batch_size // group.world_size)
    workload = workload_of(settings.model, size, settings.input_shape)
    if device is None:
        return _stretched(settings, group, workload)
    times = device.times(workload)
    # One sample of one class: its loss takes no time, and paced layers do not read it.
    share = Share(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64), 1.0)
    return TrainingSetup(
        model=PacedModel(workload, *times, gradient_like=stand_ins_for(codec)),
        workload=workload,
        source=lambda epoch, first_step=0: repeat(share),
        epoch_steps=rehearsed_steps(settings),
        samples_per_step=settings.batch_size,
        optimizer=lambda model: PacedSGD(model.parameters(), times.update_s),
        learning_rate=0.0,
        times=times,
    )


def check_world_size(workers: int | str, group: Group) -> None:
    """Raise InvalidInput if there are not as many ranks as workers were asked for."""
    if group.world_size != workers:
        raise InvalidInput("workers", f"{workers} asked for, {group.world_size} started")


def _real(settings: TrainSettings, group: Group) -> TrainingSetup:
    recipe = recipe_of(settings.model, settings.data, settings.seed)
    model = built(recipe, settings.seed)
    balanced = settings.balance is not None
    batches = share_batches(
        len(recipe.samples), settings.batch_size, settings.seed, group, balanced
    )
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
    """Return the steps by which a recipe's model, or a rank's part of it, is trained."""
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
    )


def optimizer_by(recipe: Recipe, settings: TrainSettings) -> OptimizerFactory:
    """Return a factory of the optimizer of some parameters: that of the settings, or the recipe's.

    InvalidInput for a rate or a momentum that nobody would use.
    """
    if settings.optimizer is not None or recipe.optimizer is None:
        return optimizer_for(settings)
    for name in ("learning_rate", "momentum"):
        if getattr(settings, name) is not None:
            raise InvalidInput(
                name, "the recipe makes its optimizer itself", hint="name one by optimizer, too"
            )
    return checked_optimizer(recipe.name or NAMELESS, recipe.optimizer)


def learning_by(
    recipe: Recipe, settings: TrainSettings, num_steps: int
) -> tuple[Optimize, Callable[[Optimizer], LRScheduler | None]]:
    """Return factories of the optimizer and of its schedule over so many steps.

    Those of the settings go before the recipe's own.
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
    """Return how a model learns from a batch by the settings."""
    is_bfloat16 = settings.precision == "bfloat16"
    return Learning(
        recipe.loss, settings.accumulate, settings.clip_norm, is_bfloat16, recipe.name or NAMELESS
    )


def epoch_steps(num_steps: int, settings: TrainSettings) -> tuple[int, ...]:
    """Return the steps of each epoch of the run, the last of which may be cut short.

    `num_steps` are those of a whole epoch. InvalidInput if there are too few to be measured.
    """
    if settings.steps is None:
        return (num_steps,) * settings.epochs
    if settings.steps < FEWEST_STEPS:
        raise InvalidInput("steps", f"at least {FEWEST_STEPS} are measured", got=settings.steps)
    whole, rest = divmod(settings.steps, num_steps)
    return (num_steps,) * whole + ((rest,) if rest else ())


def share_batches(
    num_samples: int, batch_size: int, seed: int, group: Group, balanced: bool = False
) -> ShardedBatches | BalancedSampler:
    """Return this rank's share of the training samples; `batch_size` is that of all ranks.

    InvalidInput if an epoch has too few steps to be measured.
    """
    kind = BalancedSampler if balanced else ShardedBatches
    batches = kind(num_samples, batch_size, group.rank, group.world_size, seed)
    if len(batches) < FEWEST_STEPS:
        raise InvalidInput(
            "batch_size",
            f"{batch_size} makes {len(batches)} steps of {num_samples} samples",
            hint=f"an epoch needs at least {FEWEST_STEPS} to be measured",
        )
    return batches


def epochs_of(
    batches: ShardedBatches | BalancedSampler, samples: IndexedSamples, device: torch.device
) -> Callable[..., Iterator[Share]]:
    """Return a function that begins an epoch and yields this rank's share of each of its steps.

    Its arguments are the epoch and the first step, by default 0.
    """
    data = loader(samples, batches)

    def source(epoch: int, first_step: int = 0) -> Iterator[Share]:
        batches.set_epoch(epoch, first_step)
        return shares(batches, data, device)

    return source


def rehearsed_steps(settings: RehearseSettings) -> tuple[int, int]:
    """Return the steps of the two parts of a rehearsal: those that are timed, and the traced."""
    return NUM_WARM_UP + settings.steps, NUM_WARM_UP + min(settings.steps, NUM_TRACED)


def _stretched(settings: RehearseSettings, group: Group, workload: Workload) -> TrainingSetup:
    size, sampler = workload.batch_size, None
    if settings.balance is not None:
        size = settings.batch_size
        sampler = BalancedSampler(size, size, group.rank, group.world_size)
    recipe = own_recipe(settings.model)
    if recipe is not None:
        model, batch, loss = built(recipe, seed=0), recipe.first(size), recipe.loss
    else:
        model, batch = _random(settings, size)
        loss = _cross_entropy

    def source(epoch: int, first_step: int = 0) -> Iterator[Share]:
        if sampler is None:
            return repeat(Share(*batch, 1.0))
        per_sample = group.world_size / size
        sizes = map(len, chain.from_iterable(repeat(sampler)))
        return (Share(*batch.rows(slice(n)), n * per_sample) for n in sizes)

    return TrainingSetup(
        model=model,
        workload=workload,
        source=source,
        epoch_steps=rehearsed_steps(settings),
        samples_per_step=settings.batch_size,
        optimizer=_IDLE_SGD.optimizer,
        learning_rate=_IDLE_SGD.learning_rate,
        learning=Learning(loss),
        sampler=sampler,
        factor=settings.stretch_of(group.rank),
    )


def _random(settings: RehearseSettings, size: int) -> tuple[nn.Module, Batch]:
    """Return a model without a recipe, and a batch of random inputs and classes."""
    architecture = find(settings.model)
    torch.manual_seed(0)
    model = architecture.build(None).eval()
    shape = settings.input_shape or architecture.input_shape
    assert shape is not None  # or the workload would not be known
    if architecture.input_dtype.is_floating_point:
        inputs = torch.randn(size, *shape)
    else:
        inputs = torch.randint(architecture.num_classes or 1, (size, *shape))
    with torch.no_grad():
        outputs = model(inputs[:1])
    if not isinstance(outputs, torch.Tensor) or outputs.ndim < 2:
        found = getattr(outputs, "shape", type(outputs).__name__)
        raise InvalidInput(
            f"model {settings.model}",
            f"gives {found}, but must give (batch, classes), or (batch, tokens, classes)",
            hint="a recipe may have any loss",
        )
    targets = torch.randint(outputs.shape[-1], (size, *outputs.shape[1:-1]))
    return model.train(), Batch(inputs, targets)


def _cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of classes, of a sample or of each of its tokens."""
    return cross_entropy(outputs.flatten(0, -2), targets.flatten())
