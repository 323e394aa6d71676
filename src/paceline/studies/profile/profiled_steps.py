"""Take a profile's training steps on this rank: unrecorded, recorded, and under torch.profiler.

Unrecorded steps are called plain. All ranks take the same steps in parallel, because ranks of one
machine slow each other down.
"""

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from paceline.core.errors import InvalidInput
from paceline.core.timeline import Span, Timeline
from paceline.core.workload import Workload, kept_nbytes, replica_nbytes
from paceline.exchange.replica import ModelReplica
from paceline.exchange.step import Learning, Share, shares, train_step
from paceline.links.clock import Clock, clock_for
from paceline.links.devices import device_of
from paceline.links.group import Group
from paceline.measure.timing import Rounds, endless, rounds_of_all, seconds_between, unrest_of
from paceline.record.merge import clock_offset, gather_timeline
from paceline.record.recorder import Recorder
from paceline.records.profile import SYNTHETIC, ProfileSettings, TensorMemory, WorkerMemoryRow
from paceline.records.settings import strategy_config
from paceline.strategies import find_exchange
from paceline.studies.profile import memory_use
from paceline.studies.profile.operators import Annotating, Step, ThroughTorch, through_torch
from paceline.training.data import ShardedBatches, loader
from paceline.training.models import describe, find
from paceline.training.recipes.named import recipe_of, takes_any_data
from paceline.training.recipes.optimizers import checked_optimizer
from paceline.training.recipes.recipe import Recipe, built

_STEPS_AN_EPOCH, _LEAST_SAMPLES = 4, 40  # minimum size of synthetic data, which has ten classes
_NUM_WARM_UP = 2
_LEARNING_RATE = 0.01
SEED = 0  # seed of the weights, the samples and dropout
_MOST_BLOCKS, _FEWEST_A_BLOCK = 5, 4
_NUM_SETTLING = 2  # untimed steps after `replica.record`, which restarts the exchange


@dataclass(frozen=True)
class ProfiledModel:
    """A model to profile, with its recipe and batches.

    `workload`: description of the layers, with the costs of this rank's share of a batch.
    """

    model: nn.Module
    recipe: Recipe
    batches: ShardedBatches
    workload: Workload

    def source(self, device: torch.device) -> Iterator[Share]:
        """Yield this rank's share of each step's samples on `device`, forever."""
        batches = loader(self.recipe.samples, self.batches)
        return endless(partial(shares, self.batches, batches, device))


def optimizer_of(recipe: Recipe, model: nn.Module) -> Optimizer:
    """Return the recipe's optimizer; if the recipe has none, return SGD with momentum."""
    if recipe.optimizer is None:
        return SGD(model.parameters(), _LEARNING_RATE, momentum=0.9)
    make = checked_optimizer(recipe.name, recipe.optimizer)
    return make([one for one in model.parameters() if one.requires_grad])


def profiled_recipe(settings: ProfileSettings) -> Recipe:
    """Return the model's recipe, with the data set that the settings name.

    If they name none, a model that accepts any data gets synthetic samples, and other models get
    their usual data.
    """
    spec = settings.data
    if spec in (None, SYNTHETIC) and takes_any_data(settings.model):
        steps = max(_STEPS_AN_EPOCH, -(-_LEAST_SAMPLES // settings.batch_size))
        shape = None if ":" in settings.model else find(settings.model).input_shape
        sizes = [] if shape is None else ["x".join(map(str, shape))]
        spec = f"{SYNTHETIC}:{','.join([*sizes, f'samples={steps * settings.batch_size}'])}"
    return recipe_of(settings.model, spec, SEED)


def subject_of(settings: ProfileSettings, group: Group) -> ProfiledModel:
    """Load the data, and build and describe the model; raises InvalidInput for bad settings."""
    recipe = profiled_recipe(settings)
    model = built(recipe, SEED)
    samples, size = len(recipe.samples), settings.batch_size
    if size > samples:
        problem = f"must be at most {samples}, the number of training samples"
        raise InvalidInput("batch_size", problem, got=size)
    batches = ShardedBatches(samples, size, group.rank, group.world_size, SEED)
    example = recipe.example(-(-size // settings.workers))
    workload = describe(model, example, settings.model)
    return ProfiledModel(model.to(group.device), recipe, batches, workload)


@dataclass(frozen=True)
class ProfiledTraining:
    """A model in training on this rank, with its optimizer and its endless source of batches.

    `replica`: the model wrapped so that backward exchanges gradients.
    """

    model: nn.Module
    replica: ModelReplica
    optimizer: Optimizer
    source: Iterator[Share]
    learning: Learning

    def step(self, recorder: Recorder, *, alone: bool = False) -> None:
        """Take one step; if `alone`, without the exchange with other ranks."""
        trained = self.model if alone else self.replica
        train_step(trained, self.optimizer, self.source, recorder, self.learning)


@dataclass
class Blocks:
    """The measurements of this rank's blocks; a block is a series of consecutive steps.

    `plain` and `recorded`: step durations in each unrecorded and each recorded block, in seconds,
    without the block's first step. `spans`: this rank's spans in each recorded block. `timelines`:
    a timeline of all ranks for each recorded block. `processor_s`: processor time of a plain step,
    averaged over steps and cores. `unrest`: half the interquartile range of the plain steps'
    times, divided by their median; the slowest rank determines a step's time.
    """

    plain: list[list[float]] = field(default_factory=list)
    recorded: list[list[float]] = field(default_factory=list)
    spans: list[list[Span]] = field(default_factory=list)
    timelines: list[Timeline] = field(default_factory=list)
    processor_s: float = 0.0
    unrest: float = 0.0


@dataclass(frozen=True)
class Findings:
    """The measurements of one rank.

    `together`: torch.profiler's measurement of steps with the exchange. `alone`: torch.profiler's
    measurement of steps without the exchange. `memory`: bytes of tensors in a step without the
    exchange. `by_operator`: net bytes that each operator allocates. `held`: memory of this process.
    """

    subject: ProfiledModel
    blocks: Blocks
    together: ThroughTorch
    alone: ThroughTorch
    memory: TensorMemory
    by_operator: dict[str, int]
    held: WorkerMemoryRow


def profile_rank(settings: ProfileSettings, subject: ProfiledModel, group: Group) -> Findings:
    """Profile this rank's share of training steps; all ranks must call this together."""
    clock, device = clock_for(group.device), group.device
    name = f"{device_of(device).kind}{group.rank}"
    recorder = Recorder(clock, name, group.rank)
    torch.manual_seed(SEED + group.rank)  # ranks must draw different dropout masks
    before = memory_use.held_nbytes(device)
    memory_use.forget_peak(device)
    strategy = find_exchange(settings.strategy)
    config = strategy_config(strategy, settings.options, settings.workers)
    training = ProfiledTraining(
        subject.model,
        strategy.runner().replica(subject.model, config, group),
        optimizer_of(subject.recipe, subject.model),
        subject.source(device),
        Learning(subject.recipe.loss),
    )
    for _ in range(_NUM_WARM_UP):
        training.step(recorder)
    recorder.step_ends()
    blocks = measure(training, recorder, clock, group, settings.steps)
    held = WorkerMemoryRow(
        worker=group.rank, before_nbytes=before, training_nbytes=memory_use.peak_nbytes(device)
    )

    def seen(step: Step) -> ThroughTorch:
        group.barrier()
        return through_torch(step, Annotating(clock, name, group.rank), subject.model)

    # Stop recording, because the steps under torch.profiler use another recorder.
    training.replica.record(None)
    together = seen(training.step)
    # Close the replica: its hooks would exchange gradients even in steps with `alone=True`.
    training.replica.close()
    alone = together if group.world_size == 1 else seen(partial(training.step, alone=True))
    memory, by_operator = _memory_alone(training, subject, clock)
    return Findings(subject, blocks, together, alone, memory, by_operator, held)


def _memory_alone(
    training: ProfiledTraining, subject: ProfiledModel, clock: Clock
) -> tuple[TensorMemory, dict[str, int]]:
    """Measure the tensors' bytes in a step without the exchange, in total and by operator."""
    optimizer, workload = training.optimizer, subject.workload
    optimizer.zero_grad(set_to_none=True)
    share, unseen = next(training.source), Recorder(clock, "", 0)
    tracked = memory_use.track(
        lambda: train_step(subject.model, optimizer, iter((share,)), unseen, training.learning),
        subject.model,
        optimizer,
        (share.inputs, share.targets),
    )
    state_nbytes = sum(tensor.nbytes for tensor in memory_use.state_of(optimizer))
    memory = TensorMemory(
        parameters=sum(parameter.nbytes for parameter in subject.model.parameters()),
        gradients=workload.gradient_nbytes,
        momentum=state_nbytes,
        features=kept_nbytes(workload.layers),
        inputs=workload.input_nbytes,
        # replica_nbytes adds the gradients' size for the momentum; use the real state's size.
        predicted=replica_nbytes(workload) - workload.gradient_nbytes + state_nbytes,
        measured=tracked.peak_nbytes,
    )
    return memory, tracked.by_operator


def split(num_steps: int) -> tuple[int, int]:
    """Return the number and size of blocks with at least `num_steps` steps in total."""
    num_blocks = max(2, min(_MOST_BLOCKS, num_steps // _FEWEST_A_BLOCK))
    return num_blocks, -(-num_steps // num_blocks)


def measure(
    training: ProfiledTraining, recorder: Recorder, clock: Clock, group: Group, num_steps: int
) -> Blocks:
    """Take pairs of blocks, one plain and one recorded; all ranks must call this together.

    `num_steps`: least number of plain steps, and also of recorded steps. The order within a
    pair alternates, so that a machine that slows down affects plain and recorded blocks equally. If
    the durations of plain steps vary too much, the number of blocks is doubled.
    """
    num_blocks, size = split(num_steps)
    settling = _NUM_SETTLING if group.world_size > 1 else 0
    found, block = Blocks(), partial(_block, training, recorder, clock, size, settling)

    def pairs() -> Rounds:
        """Take `num_blocks` pairs of blocks; return the duration of each plain step."""
        earlier = len(found.plain)
        for number in range(num_blocks):
            for recorded in (False, True) if number % 2 == 0 else (True, False):
                # Without a barrier, the first step would wait for ranks that still gather spans.
                group.barrier()
                if recorded:
                    found.recorded.append(block(recorded=True))
                    spans = recorder.spans()
                    found.spans.append(spans)
                    found.timelines.append(gather_timeline(spans, clock_offset(group), group))
                else:
                    before_s = time.process_time()
                    found.plain.append(block(recorded=False))
                    found.processor_s += time.process_time() - before_s
        return [[seconds] for own in found.plain[earlier:] for seconds in own]

    found.unrest = unrest_of(rounds_of_all(pairs, group))
    taken = len(found.plain) * (size + 1 + settling)
    found.processor_s /= taken * len(os.sched_getaffinity(0))
    return found


def _block(
    training: ProfiledTraining,
    recorder: Recorder,
    clock: Clock,
    size: int,
    settling: int,
    *,
    recorded: bool,
) -> list[float]:
    """Take a block of steps, and return the durations of its last `size` steps in seconds.

    The block has `settling` warm-up steps, then one step whose end starts the clock, and then the
    timed steps. `recorded`: record all steps except the warm-up steps.
    """
    training.replica.record(recorder if recorded else None)
    for _ in range(settling):
        training.step(recorder)
    if recorded:
        recorder.start_trace(training.model)
    marks: list[Any] = []
    for _ in range(size + 1):
        training.step(recorder)
        marks.append(clock.mark())
    recorder.stop_trace()
    recorder.step_ends()
    return seconds_between(clock, marks)


def typical(seconds: Sequence[float]) -> float:
    """Return the mean of the middle half of `seconds`, as in `Timeline.typical_step_s`."""
    outer = len(seconds) // 4
    middle = sorted(seconds)[outer : len(seconds) - outer]
    return sum(middle) / len(middle)
