"""Train, test, save and load the model of a synchronous run."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.checkpoints.state import (
    check_fits,
    load_module_state,
    load_optimizer_state,
    load_schedule_state,
    module_state,
    optimizer_state,
    schedule_state,
)
from paceline.core.errors import InvalidInput
from paceline.exchange.checkpoints import State
from paceline.exchange.replica import ModelReplica
from paceline.exchange.setup import TrainingSetup
from paceline.exchange.step import OF_CLASSES, Learning, Share, train_step
from paceline.links.devices import random_numbers_restored
from paceline.links.group import Group
from paceline.record.recorder import Recorder
from paceline.training.data.batch import Batch, call
from paceline.training.data.dataset import IndexedSamples
from paceline.training.models.halves import values_restored
from paceline.training.recipes.recipe import NAMELESS, Recipe, scalar_of

_TEST_BATCH = 256
_TEST_TOKENS = 16384  # most tokens in a test batch, because each token's logits need much memory


@dataclass(frozen=True)
class Learner:
    """Functions by which a training loop takes steps, tests the model, and saves its state.

    `traced`: the module whose layers are recorded. `step(batches)`: takes a training step, records
    it, and returns this rank's weighted loss. `test(samples)`: returns the sums of loss and score
    over the test samples that this rank tests. `state()`: returns the state that is saved once for
    all ranks, with layers whole even if they are split between ranks. `load(state)`: loads it.
    `state` and `load` are collective. `prepare(batch)`: runs a forward and backward pass
    without lasting effects, for `ModelReplica.prepare`.
    """

    traced: nn.Module
    step: Callable[[Iterator[Share]], Tensor]
    test: Callable[[IndexedSamples], tuple[float, float]]
    state: Callable[[], State]
    load: Callable[[State], None]
    prepare: Callable[[Share], None] = lambda share: None


class WholeModel:
    """Creates the `Learner` of a rank that has all layers of the model."""

    def __init__(
        self, group: Group, setup: TrainingSetup, recorder: Recorder, replica: ModelReplica
    ) -> None:
        self._group, self._setup = group, setup
        self._recorder, self._replica, self._model = recorder, replica, setup.model
        self._optimizer = setup.optimizer(setup.model)
        self._schedule = setup.schedule(self._optimizer)

    @property
    def learner(self) -> Learner:
        """The functions by which the training loop trains this rank's model."""
        own = self._step, self._test, self._state, self._load, self._prepare
        return Learner(self._model, *own)

    def _step(self, source: Iterator[Share]) -> Tensor:
        own = self._replica, self._optimizer, source, self._recorder
        return train_step(*own, self._setup.learning, self._schedule)

    def _test(self, samples: IndexedSamples) -> tuple[float, float]:
        # broadcast rank 0's running statistics, so that all ranks test the same model
        self._group.broadcast(self._model.buffers())
        recipe = self._setup.recipe
        assert recipe is not None
        return evaluate(self._model, samples, self._group, recipe, self._setup.learning)

    def _prepare(self, share: Share) -> None:
        buffers = self._model.buffers()
        with random_numbers_restored({self._group.device}), values_restored(buffers):
            self._setup.learning.forward(self._replica, share).backward()
        self._model.zero_grad()

    def _state(self) -> State:
        return learned_state(self._model, self._optimizer, self._schedule)

    def _load(self, state: State) -> None:
        load_learned_state(state, self._model, self._optimizer, self._schedule)


def learned_state(model: nn.Module, optimizer: Optimizer, schedule: LRScheduler | None) -> State:
    """Return the checkpoint state of a model, its optimizer and its learning rate schedule."""
    tensors, values = optimizer_state(optimizer, model.named_parameters())
    found = {f"model/{name}": one for name, one in module_state(model).items()}
    found |= {f"optimizer/{name}": one for name, one in tensors.items()}
    parts = {"optimizer": values}
    if schedule is not None:
        parts["schedule"] = schedule_state(schedule)
    return State(found, parts)


def load_learned_state(
    state: State, model: nn.Module, optimizer: Optimizer, schedule: LRScheduler | None
) -> None:
    """Load a state from `learned_state`; raises InvalidInput if it does not fit the model."""
    own = state.file("optimizer"), state.parts["optimizer"]
    try:
        check_fits(module_state(model), state.file("model"))  # raises before anything is loaded
        load_optimizer_state(optimizer, model.named_parameters(), *own)
        if schedule is not None:
            load_schedule_state(schedule, state.parts.get("schedule"))
        load_module_state(model, state.file("model"))
    except InvalidInput as error:
        raise InvalidInput("resume", str(error)) from None


@torch.no_grad()
def evaluate(
    model: nn.Module,
    samples: IndexedSamples,
    group: Group,
    recipe: Recipe,
    learning: Learning = OF_CLASSES,
) -> tuple[float, float]:
    """Test this rank's part of the samples; return the sums of their losses and scores.

    Rank r of n tests samples r, r + n, r + 2 n, and so on.
    """
    model.eval()
    name = recipe.name or NAMELESS
    loss = score = 0.0
    own = range(group.rank, len(samples), group.world_size)
    size = max(1, min(_TEST_BATCH, _TEST_TOKENS // (recipe.tokens_per_sample or 1)))
    for first in range(0, len(own), size):
        rows = own[first : first + size]
        inputs, targets = Batch.of(samples.__getitems__(rows)).to(group.device)
        with learning.autocast(group.device):
            outputs: Any = call(model, inputs)
            loss += float(scalar_of(f"loss of {name}", recipe.loss, outputs, targets)) * len(rows)
            if recipe.score is not None:
                found = scalar_of(f"score of {name}", recipe.score, outputs, targets)
                score += float(found) * len(rows)
    return loss, score


def tested(
    model: nn.Module, group: Group, recipe: Recipe, learning: Learning
) -> tuple[float | None, float | None]:
    """Test all samples on the only rank of `group`; return mean loss and mean score.

    The loss is None without test samples, and the score without a score function.
    """
    if (samples := recipe.test_samples) is None:
        return None, None
    loss, score = evaluate(model, samples, group, recipe, learning)
    return loss / len(samples), score / len(samples) if recipe.score is not None else None
