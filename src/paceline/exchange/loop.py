"""The loop of the synchronous strategies: epochs, their steps, and tests."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline.core.errors import InvalidInput
from paceline.core.outcome import Epoch, Evaluation
from paceline.core.timeline import Span
from paceline.data.batch import Batch, call
from paceline.data.dataset import IndexedSamples
from paceline.exchange.replica import ModelReplica
from paceline.exchange.session import TrainingSession
from paceline.exchange.setup import FEWEST_STEPS, NUM_TRACED, NUM_WARM_UP, TrainingSetup
from paceline.exchange.step import Learning, Share, train_step
from paceline.links.group import Group
from paceline.recipes.recipe import Recipe
from paceline.record.merge import ClockOffset, clock_offset
from paceline.record.recorder import Recorder

_TEST_BATCH = 256
_TEST_TOKENS = 16384  # of a batch: logits of a language model take much more memory than its input
_STATUS_S = 0.5


class Place(NamedTuple):
    """A place in the run: an epoch, and how many of its steps are done."""

    epoch: int = 0
    step: int = 0


@dataclass
class Learned:
    """What a run has done so far, beside its model: where it is, and what was measured of it.

    `loss` is the sum of this rank's weighted losses of the epoch's steps.
    """

    place: Place = field(default_factory=Place)
    loss: float = 0.0
    epochs: list[Epoch] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)


@dataclass(frozen=True)
class Trained:
    """The epochs of a training, this rank's traced spans, and its steps' seconds.

    `offset`: the offset of this rank's clock when the spans were recorded.
    """

    epochs: tuple[Epoch, ...]
    evaluations: tuple[Evaluation, ...]
    spans: tuple[Span, ...]
    offset: ClockOffset
    step_seconds: tuple[float, ...]


@dataclass(frozen=True)
class Learner:
    """The steps and tests of a run.

    `traced`: the module whose layers the recorder watches. `step` takes a step, records it, and
    returns this rank's weighted loss. `test` returns the summed loss and score of this rank's share
    of the samples.
    """

    traced: nn.Module
    step: Callable[[Iterator[Share]], Tensor]
    test: Callable[[IndexedSamples], tuple[float, float]]


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
    if learner is None:
        learner = whole_model(session, setup, recorder, replica)
    loop = _Loop(session, setup, recorder, replica, learner)
    session.progress.begin(sum(setup.epoch_steps), "steps")
    for number in range(len(setup.epoch_steps)):
        loop.epoch(number)
    replica.close()
    return loop.trained()


class _Loop:
    """One training: its parts, and what it has measured so far."""

    def __init__(
        self,
        session: TrainingSession,
        setup: TrainingSetup,
        recorder: Recorder,
        replica: ModelReplica,
        learner: Learner,
    ) -> None:
        self._session, self._setup, self._recorder = session, setup, recorder
        self._replica, self._learner = replica, learner
        self.learned = Learned()
        self._traced = traced_steps(setup.epoch_steps)
        self._seconds: list[float] = []
        self._spans: tuple[Span, ...] = ()
        self._offset: ClockOffset | None = None
        self._status = _Status(session, setup)

    def epoch(self, number: int) -> None:
        """Train one epoch, and test the model."""
        setup, recorder, learned = self._setup, self._recorder, self.learned
        num_steps, is_traced = setup.epoch_steps[number], number == self._traced.epoch
        # Recording costs time: only the traced epoch has a recorder.
        if number in (self._traced.epoch, self._traced.epoch + 1):
            self._replica.record(recorder if is_traced else None)
        started, tested_s = time.monotonic(), 0.0
        setup.model.train()
        learned.place = Place(number, 0)
        source = setup.source(number)
        total = torch.zeros((), device=self._session.group.device)
        paused = set[int]()  # steps before which the model was tested
        for step in range(num_steps):
            if is_traced and step == self._traced.step:
                recorder.start_trace(self._learner.traced)
            loss = self._learner.step(source)
            total += loss
            learned.place = Place(number, step + 1)
            self._status.step(loss)
            if self._is_due(step + 1 < num_steps):
                tested_s += self._evaluate()
                paused.add(step + 1)
        recorder.stop_trace()
        learned.loss = float(total)  # waits for the device
        self._measure(is_traced, paused)
        if setup.recipe is not None:
            self._end_epoch(time.monotonic() - started - tested_s)

    def trained(self) -> Trained:
        """Return what was measured."""
        learned = self.learned
        assert self._offset is not None  # an epoch was traced
        return Trained(
            tuple(learned.epochs),
            tuple(learned.evaluations),
            self._spans,
            self._offset,
            tuple(self._seconds),
        )

    def _measure(self, is_traced: bool, paused: set[int]) -> None:
        """Add the seconds of the epoch's steps, and its spans if it was traced."""
        ends = self._recorder.step_ends()
        if is_traced:
            ends = ends[: self._traced.step] if len(self._setup.epoch_steps) == 1 else []
            self._spans = tuple(self._recorder.spans())
            self._offset = clock_offset(self._session.group)
        steps = list(enumerate(pairwise(ends), 1))[NUM_WARM_UP - 1 :]
        self._seconds += [end - start for step, (start, end) in steps if step not in paused]

    def _is_due(self, is_within: bool) -> bool:
        every = self._setup.evaluate_every
        return every is not None and is_within and self.num_steps % every == 0

    @property
    def num_steps(self) -> int:
        """The steps of the run so far."""
        epoch, step = self.learned.place
        return sum(self._setup.epoch_steps[:epoch]) + step

    def _evaluate(self) -> float:
        """Test the model in the middle of an epoch; return the seconds that it took."""
        started = time.monotonic()
        found = self._tested([0.0])[1]
        self.learned.evaluations.append(found)
        self._session.progress.evaluation(found, score_of(self._setup.recipe))
        self._setup.model.train()
        return time.monotonic() - started

    def _end_epoch(self, took_s: float) -> None:
        """Test the model after an epoch. InvalidInput if a loss is not finite."""
        setup, learned, group = self._setup, self.learned, self._session.group
        number, num_steps = learned.place
        loss = learned.loss / (num_steps * group.world_size)
        train_loss, found = self._tested([loss])
        test_loss = train_loss if found.test_loss is None else found.test_loss
        if not (isfinite(train_loss) and isfinite(test_loss)):
            raise InvalidInput(
                f"learning_rate: with {setup.learning_rate:g} the training loss is "
                f"{train_loss} and the test loss {test_loss} after epoch {number + 1}; choose a "
                "smaller one"
            )
        epoch = Epoch(number, train_loss, found.test_loss, found.score, took_s)
        learned.epochs.append(epoch)
        if setup.evaluate_every is not None:
            learned.evaluations.append(found)
        self._session.progress.epoch(epoch, score_of(setup.recipe))

    def _tested(self, sums: list[float]) -> tuple[float, Evaluation]:
        """Return the sum of this value over all ranks, and the test of the model as it is."""
        recipe, group = self._setup.recipe, self._session.group
        assert recipe is not None
        samples = recipe.test_samples
        tested = (0.0, 0.0) if samples is None else self._learner.test(samples)
        # Each rank has tested its share of the samples.
        rows = group.gather([*sums, *tested])
        value, loss, score = (sum(column) for column in zip(*rows, strict=True))
        if samples is None:
            return value, Evaluation(self.num_steps, None, None)
        size = len(samples)
        has_score = recipe.score is not None
        return value, Evaluation(self.num_steps, loss / size, score / size if has_score else None)


class _Status:
    """Shows the loss and the throughput beside the bar, a few times a second."""

    def __init__(self, session: TrainingSession, setup: TrainingSetup) -> None:
        self._progress, self._samples = session.progress, setup.samples_per_step
        self._tokens = setup.recipe.tokens_per_sample if setup.recipe else None
        self._since_s, self._num_steps = time.monotonic(), 0

    def step(self, loss: Tensor) -> None:
        """Count a step, and show this rank's loss of it if it is time to."""
        self._progress.advance()
        self._num_steps += 1
        took_s = time.monotonic() - self._since_s
        if took_s < _STATUS_S:
            return
        rate = self._num_steps * self._samples / took_s
        tokens = f", {rate * self._tokens:,.0f} tokens/s" if self._tokens else ""
        self._progress.status(f"loss {float(loss):.4g}, {rate:,.0f} samples/s{tokens}")
        self._since_s, self._num_steps = time.monotonic(), 0


def whole_model(
    session: TrainingSession, setup: TrainingSetup, recorder: Recorder, replica: ModelReplica
) -> Learner:
    """Return the learner of a rank that has the whole model."""
    model, group, recipe = setup.model, session.group, setup.recipe
    optimizer = setup.optimizer(model)
    schedule, learning = setup.schedule(optimizer), setup.learning

    def step(source: Iterator[Share]) -> Tensor:
        return train_step(replica, optimizer, source, recorder, learning, schedule)

    def test(samples: IndexedSamples) -> tuple[float, float]:
        # Running statistics differ between ranks, so broadcast rank 0's: all test the same model.
        group.broadcast(model.buffers())
        assert recipe is not None
        return evaluate(model, samples, group, recipe, learning)

    return Learner(model, step, test)


def traced_steps(epoch_steps: Sequence[int]) -> Place:
    """Return the epoch whose last steps are traced, and the first of them.

    It is the second epoch, if that is long enough; an only epoch keeps half of its steps to be
    measured.
    """
    has_second = len(epoch_steps) > 1 and epoch_steps[1] >= FEWEST_STEPS
    epoch = 1 if has_second else 0
    return Place(epoch, num_untraced(epoch_steps[epoch], is_only=len(epoch_steps) == 1))


def num_untraced(num_steps: int, *, is_only: bool) -> int:
    """Return the number of steps of an epoch before the traced ones."""
    steady = num_steps - NUM_WARM_UP
    return num_steps - min(NUM_TRACED, max(2, steady // 2) if is_only else steady)


def score_of(recipe: Recipe | None) -> str:
    """Return the name of a recipe's score."""
    return "loss" if recipe is None else recipe.score_name


@torch.no_grad()
def evaluate(
    model: nn.Module,
    samples: IndexedSamples,
    group: Group,
    recipe: Recipe,
    learning: Learning | None = None,
) -> tuple[float, float]:
    """Return the summed loss and the summed score of this rank's share of the samples.

    Every sample is tested by exactly one rank.
    """
    model.eval()
    loss = score = 0.0
    own = range(group.rank, len(samples), group.world_size)
    size = max(1, min(_TEST_BATCH, _TEST_TOKENS // (recipe.tokens_per_sample or 1)))
    for first in range(0, len(own), size):
        rows = own[first : first + size]
        inputs, targets = Batch.of(samples.__getitems__(rows)).to(group.device)
        with (learning or Learning(recipe.loss)).autocast(group.device):
            outputs: Any = call(model, inputs)
            loss += float(recipe.loss(outputs, targets)) * len(rows)
            if recipe.score is not None:
                score += float(recipe.score(outputs, targets)) * len(rows)
    return loss, score
