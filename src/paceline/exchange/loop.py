"""Run the training loop of synchronous strategies: epochs, steps, tests and checkpoints."""

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, pairwise
from math import isfinite
from typing import Any, NamedTuple

import torch

from paceline.checkpoints.tensor_file import within
from paceline.core.errors import InvalidInput
from paceline.core.outcome import Epoch, Evaluation
from paceline.core.settings import TrainSettings
from paceline.core.timeline import Span
from paceline.exchange.checkpoints import (
    Saver,
    State,
    check_same_run,
    of_rank,
    restore_random,
    with_ranks,
)
from paceline.exchange.learner import Learner, WholeModel
from paceline.exchange.replica import NONE, ModelReplica
from paceline.exchange.session import Status, TrainingSession
from paceline.exchange.setup import FEWEST_STEPS, NUM_TRACED, NUM_WARM_UP, TrainingSetup
from paceline.exchange.step import Share
from paceline.links.interruption import Interruption, interruptible
from paceline.record.merge import ClockOffset, clock_offset
from paceline.record.recorder import Recorder
from paceline.training.recipes.recipe import Recipe

logger = logging.getLogger(__name__)


class Place(NamedTuple):
    """Position in a run: index of the epoch, and number of steps taken in this epoch."""

    epoch: int = 0
    step: int = 0


@dataclass(frozen=True)
class Trained:
    """The result of a training on this rank.

    `epochs`: losses and score of each epoch. `evaluations`: results of all tests; empty unless
    `evaluate_every` is set. `spans`: the traced times of the last steps of one epoch. `offset`:
    offset of this rank's clock to rank 0's during the trace. `step_seconds`: durations of untraced
    steps. `sent_share`: fraction of the gradient values that this rank has sent; None if its codec
    sends all values.
    """

    epochs: tuple[Epoch, ...]
    evaluations: tuple[Evaluation, ...]
    spans: tuple[Span, ...]
    offset: ClockOffset
    step_seconds: tuple[float, ...]
    sent_share: float | None = None


def train(
    session: TrainingSession,
    setup: TrainingSetup,
    recorder: Recorder,
    replica: ModelReplica,
    learner: Learner | None = None,
) -> Trained:
    """Train all epochs of a model whose gradients `replica` exchanges, and close the replica.

    `learner`: takes the steps. Default: the learner of a WholeModel. The last steps are traced (see
    `traced_steps`). The result's `step_seconds` exclude them, and the first steps of each epoch.
    Raises InvalidInput for the learning rate if a loss is NaN or infinite. After SIGINT, saves the
    state and raises Interrupted.
    """
    if learner is None:
        learner = WholeModel(session.group, setup, recorder, replica).learner
    with interruptible() as interruption:
        loop = _Loop(session, setup, recorder, replica, learner, interruption)
        try:
            return loop.run()
        finally:
            replica.close()


class _Loop:
    """Trains the epochs of one `train` call, and stores progress and measurements."""

    def __init__(
        self,
        session: TrainingSession,
        setup: TrainingSetup,
        recorder: Recorder,
        replica: ModelReplica,
        learner: Learner,
        interruption: Interruption,
    ) -> None:
        self._session, self._setup, self._recorder = session, setup, recorder
        self._replica, self._learner = replica, learner
        self._place, self._loss = Place(), 0.0  # loss: sum over this rank's steps in the epoch
        self._epochs, self._evaluations = list[Epoch](), list[Evaluation]()
        if session.resumed is not None:
            learner.load(session.resumed)
            self._resume(session.resumed)
        self._first = self._place
        self._traced = traced_steps(setup.epoch_steps, self._first)
        self._seconds: list[float] = []
        # the ends of the traced epoch's steps before the trace; None until the trace starts
        self._untraced: list[float] | None = None
        self._spans: tuple[Span, ...] = ()
        self._offset: ClockOffset | None = None
        tokens = setup.recipe.tokens_per_sample if setup.recipe else None
        self._status = Status(session.progress, tokens)
        self._saver: Saver | None = None
        if isinstance(session.settings, TrainSettings):
            folder = session.folder if session.writes_files else None
            self._saver = Saver(
                session.group, folder, session.settings, interruption, self._num_steps
            )

    def run(self) -> Trained:
        """Train the epochs that are left, and return losses, scores and measured times."""
        session, epoch_steps = self._session, self._setup.epoch_steps
        session.progress.begin(sum(epoch_steps), "steps")
        if session.resumed is not None:
            session.progress.advance(self._num_steps)
            self._prepare(next(iter(self._setup.source(0, 0))))
            restore_random(session.resumed, session.group)
        for number in range(self._first.epoch, len(epoch_steps)):
            self._epoch(number, self._first.step if number == self._first.epoch else 0)
        if self._saver is not None:
            self._saver.close()
        assert self._offset is not None  # `_measure` has set it in the traced epoch
        return Trained(
            tuple(self._epochs),
            tuple(self._evaluations),
            self._spans,
            self._offset,
            tuple(self._seconds),
            self._replica.statistics().sent_share,
        )

    def _epoch(self, number: int, first_step: int) -> None:
        """Train epoch `number` from step `first_step` to its end, then test the model."""
        setup, num_steps = self._setup, self._setup.epoch_steps[number]
        started, paused_s = time.monotonic(), 0.0
        setup.model.train()
        before = self._loss if first_step else 0.0
        self._place = Place(number, first_step)
        source = setup.source(number, first_step)
        self._total = torch.tensor(before, device=self._session.group.device)
        paused = set[int]()  # steps that follow a test, as offsets from `first_step`
        for step in range(first_step, num_steps):
            if (number, step) == self._traced:
                before_s = time.monotonic()
                source = self._start_trace(source)
                paused_s += time.monotonic() - before_s
            loss = self._learner.step(source)
            self._total += loss
            self._place = Place(number, step + 1)
            self._status.add(self._setup.samples_per_step, loss)
            every = setup.evaluate_every
            if every is not None and step + 1 < num_steps and self._num_steps % every == 0:
                paused_s += self._test()
                paused.add(step + 1 - first_step)
            if self._saver is not None:
                self._saver.after(self._num_steps, self._state)
        self._recorder.stop_trace()
        self._loss = float(self._total)  # waits for a GPU, so that the time below is complete
        self._measure(number, paused, time.monotonic() - started - paused_s)
        if setup.recipe is not None:
            self._end_epoch(time.monotonic() - started - paused_s)

    def _measure(self, number: int, paused: set[int], took_s: float) -> None:
        """Store untraced step times of epoch `number`, and the spans of the traced steps, if any.

        `took_s`: duration of the epoch's steps. Steps in `paused` have no valid duration.
        """
        ends, last = self._recorder.step_ends(), len(self._setup.epoch_steps) - 1
        num_steps = len(ends)
        if self._untraced is not None:  # recorded steps are not measured: recording takes time
            num_steps += len(self._untraced)
            ends, self._untraced = self._untraced, []
        if number == self._traced.epoch:
            self._spans = tuple(self._recorder.spans())
            self._offset = clock_offset(self._session.group)
        steps = list(enumerate(pairwise(ends), 1))[NUM_WARM_UP - 1 :]
        self._seconds += [end - start for step, (start, end) in steps if step not in paused]
        # a resumed run may have too few steps: then use the mean of all steps
        if number == last and num_steps and not self._seconds:
            self._seconds = [took_s / num_steps]

    @property
    def _num_steps(self) -> int:
        """Number of steps since the start of the run."""
        epoch, step = self._place
        return sum(self._setup.epoch_steps[:epoch]) + step

    def _test(self) -> float:
        """Test the model within an epoch; return the seconds that the test took."""
        started = time.monotonic()
        _, found = self._tested()
        self._evaluations.append(found)
        self._session.progress.evaluation(found, score_of(self._setup.recipe))
        self._setup.model.train()
        return time.monotonic() - started

    def _end_epoch(self, took_s: float) -> None:
        """Test the model after an epoch of `took_s` seconds, and report losses and score."""
        setup, (number, num_steps) = self._setup, self._place
        world_size = self._session.group.world_size
        train_loss, found = self._tested(self._loss / (num_steps * world_size))
        epoch = epoch_of(number, train_loss, found, took_s, setup.learning_rate)
        self._epochs.append(epoch)
        if setup.evaluate_every is not None:
            self._evaluations.append(found)
        self._session.progress.epoch(epoch, score_of(setup.recipe))

    def _tested(self, own: float = 0.0) -> tuple[float, Evaluation]:
        """Return the sum of all ranks' training losses `own`, and the test result; collective."""
        recipe, group = self._setup.recipe, self._session.group
        assert recipe is not None
        samples = recipe.test_samples
        tested = (0.0, 0.0) if samples is None else self._learner.test(samples)
        rows = group.gather([own, *tested])
        value, loss, score = (sum(column) for column in zip(*rows, strict=True))
        if samples is None:
            return value, Evaluation(self._num_steps, None, None)
        size = len(samples)
        has_score = recipe.score is not None
        return value, Evaluation(self._num_steps, loss / size, score / size if has_score else None)

    def _start_trace(self, source: Iterator[Share]) -> Iterator[Share]:
        """Record all steps from now on; return the batches of `source`."""
        self._untraced, share = self._recorder.step_ends(), next(source)
        self._replica.record(self._recorder)
        self._prepare(share)
        self._recorder.start_trace(self._learner.traced)
        return chain((share,), source)

    def _prepare(self, share: Share) -> None:
        """Let torch's reducer, if in use, rebuild its buckets in a pass without effects."""
        self._setup.model.train()
        self._replica.prepare(lambda: self._learner.prepare(share))

    def _state(self, num_steps: int) -> State:
        """Return the state to save after `num_steps` steps, complete on rank 0; collective."""
        session, common = self._session, self._learner.state()
        sampler, used = self._setup.sampler, self._replica.statistics()
        progress = {
            "run": run_of(session, self._setup),
            "place": list(self._place),
            "num_steps": num_steps,
            "epochs": list(map(asdict, self._epochs)),
            "evaluations": list(map(asdict, self._evaluations)),
            "strategy": session.strategy.name if used.exchange == NONE.exchange else used.exchange,
            "chunk": used.chunk,
            "shares": None if sampler is None else list(sampler.shares),
        }
        state = State(common.tensors, common.parts | {"progress": progress})
        own = {f"exchange/{key}": one for key, one in self._replica.exchange_state().items()}
        return with_ranks(state, own, {"loss": float(self._total)}, session.group)

    def _resume(self, state: State) -> None:
        """Restore this run's position, its losses, and this rank's error feedback."""
        session, setup = self._session, self._setup
        saved = state.parts["progress"]
        if "place" not in saved:
            raise state.wrong_strategy()
        check_same_run(saved["run"], run_of(session, setup))
        own, losses = of_rank(state, session.group), [row["loss"] for row in state.parts["ranks"]]
        # The sum of all ranks' losses is proportional to the number of ranks. If this number has
        # changed, rank 0 takes the sum, scaled to the new number; other ranks take 0.
        scale = session.group.world_size / len(losses)
        if own is None:
            self._loss = sum(losses) * scale if session.group.rank == 0 else 0.0
        else:
            tensors, values = own
            self._loss = values["loss"]
            self._replica.load_exchange_state(within(tensors, "exchange/"))
            if setup.sampler is not None and saved["shares"] is not None:
                setup.sampler.update(saved["shares"])
        self._place = Place(*saved["place"])
        if self._num_steps == sum(setup.epoch_steps) and saved["epochs"]:
            logger.info("all steps are done; only the last test is left")
        self._epochs = [Epoch(**one) for one in saved["epochs"]]
        self._evaluations = [Evaluation(**one) for one in saved["evaluations"]]


def run_of(session: TrainingSession, setup: TrainingSetup) -> dict[str, Any]:
    """Return the properties of a run, by name, that must be equal when it is resumed."""
    settings, recipe = session.settings, setup.recipe
    assert isinstance(settings, TrainSettings)
    assert recipe is not None
    return {
        "model": settings.model,
        "num_parameters": setup.workload.num_parameters,
        "num_samples": len(recipe.samples),
        "batch_size": settings.batch_size,
        "seed": settings.seed,
    }


def traced_steps(epoch_steps: Sequence[int], first: Place | None = None) -> Place:
    """Return the epoch whose last steps are traced, and the number of the first traced step.

    `epoch_steps`: number of steps of each epoch. `first`: where training begins or resumes. The
    last epoch that is long enough is traced. If no epoch precedes it, about half of its steps are
    not traced, so that their durations can be measured.
    """
    begin = first or Place()
    lengths = [epoch_steps[begin.epoch] - begin.step, *epoch_steps[begin.epoch + 1 :]]
    number = max((i for i, length in enumerate(lengths) if length >= FEWEST_STEPS), default=0)
    num_steady = max(0, lengths[number] - NUM_WARM_UP)
    most = max(1, num_steady) if number else max(2, num_steady // 2)
    step = max(0, lengths[number] - min(NUM_TRACED, most))
    return Place(begin.epoch + number, step if number else begin.step + step)


def epoch_of(
    number: int, train_loss: float, found: Evaluation, seconds: float, rate: float | None = None
) -> Epoch:
    """Create the record of an epoch; `found`: result of the test after it.

    Raises InvalidInput if a loss is NaN or infinite. `rate`: learning rate, or None if default.
    """
    test_loss = train_loss if found.test_loss is None else found.test_loss
    if not (isfinite(train_loss) and isfinite(test_loss)):
        problem = f"led to training loss {train_loss}, test loss {test_loss} in epoch {number + 1}"
        got = "the default" if rate is None else rate
        raise InvalidInput("learning_rate", problem, got=got, hint="use a smaller one")
    return Epoch(number, train_loss, found.test_loss, found.score, seconds)


def score_of(recipe: Recipe | None) -> str:
    """Return the name of a recipe's score, such as "accuracy"; "loss" without a recipe."""
    return "loss" if recipe is None else recipe.score_name
