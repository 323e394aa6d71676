"""The epochs and tests of a run, and its seconds of training, as the hub counts them."""

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import isfinite

from paceline.core.errors import InvalidInput
from paceline.core.outcome import Epoch, Evaluation
from paceline.exchange.loop import score_of
from paceline.exchange.session import Progress
from paceline.exchange.setup import TrainingSetup
from paceline.strategies.local.protocol import Loss, PartHeader, Tested


class Diverged(InvalidInput):
    """The loss of the group is not finite, which no worker alone is to blame for."""


@dataclass
class Test:
    """A test of the group's parameters after so many steps: whose parts are still to come."""

    exchange: int
    num_steps: int
    ends_epoch: int | None
    expected: set[int]
    began_s: float
    found: list[Tested] = field(default_factory=list)


class RunLog:
    """Counts what workers tell of, and decides when they test.

    `epoch_steps` are those of each epoch; a rehearsal has no epochs and no tests. `epochs` and
    `evaluations` are those of a run that this one goes on from.
    """

    def __init__(
        self,
        setup: TrainingSetup,
        num_workers: int,
        progress: Progress,
        evaluate_every: int | None,
        epochs: Sequence[Epoch] = (),
        evaluations: Sequence[Evaluation] = (),
    ) -> None:
        self._recipe, self._num_workers, self._progress = setup.recipe, num_workers, progress
        self._samples = None if setup.recipe is None else setup.recipe.test_samples
        self._score, self._every = score_of(setup.recipe), evaluate_every
        self._ends = [sum(setup.epoch_steps[: i + 1]) for i in range(len(setup.epoch_steps))]
        self._samples_per_step = setup.samples_per_step
        self._tokens = setup.recipe.tokens_per_sample if setup.recipe else None
        self._rate = setup.learning_rate
        self.epochs, self.evaluations = list(epochs), list(evaluations)
        self._losses: defaultdict[int, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
        self.samples_of: Counter[int] = Counter()  # by worker
        self._test: Test | None = None
        self._shown_s, self._last_loss = 0.0, float("nan")
        self.num_steps = self._tested = 0  # steps of the run
        self._began_s = self._tests_s = 0.0
        self._ends_of_rounds: list[tuple[float, int]] = []  # seconds of training, steps

    @property
    def is_testing(self) -> bool:
        """True while parts of a test are still to come."""
        return self._test is not None

    @property
    def test_units(self) -> float:
        """The inner steps that have as many samples as the test whose parts are still to come."""
        if self._test is None or self._samples is None:
            return 0.0
        return len(self._samples) * self._num_workers / self._samples_per_step

    @property
    def trained_s(self) -> float:
        """Seconds of training, without tests."""
        return time.monotonic() - self._began_s - self._tests_s if self._began_s else 0.0

    @property
    def step_seconds(self) -> tuple[float, ...]:
        """The seconds of a step in each round but the first."""
        pairs = pairwise(self._ends_of_rounds)
        return tuple(
            (end_s - start_s) / (after - before)
            for (start_s, before), (end_s, after) in pairs
            if after > before
        )

    def begin(self, num_steps: int = 0) -> None:
        """Count seconds from now, after so many steps of the run."""
        self._began_s = time.monotonic()
        self.num_steps = self._tested = num_steps

    def count(self, worker: int, header: PartHeader) -> None:
        """Count what a worker has trained on since its last part."""
        for loss in header.losses:
            self.add_loss(loss)
            self.samples_of[worker] += loss.num_samples
            if loss.num_samples:
                self._last_loss = loss.total / loss.num_samples

    def add_loss(self, loss: Loss) -> None:
        """Add the loss of some samples of an epoch."""
        count, total = self._losses[loss.epoch]
        self._losses[loss.epoch] = count + loss.num_samples, total + loss.total

    def losses(self) -> list[Loss]:
        """Return the losses of the epochs that are not over."""
        return [
            Loss(epoch=epoch, num_samples=count, total=total)
            for epoch, (count, total) in self._losses.items()
        ]

    def end_round(self, exchange: int, num_steps: int, there: Sequence[int]) -> bool:
        """Count a round, after which so many steps are done; return True if workers are to test.

        `there` are the workers that can. Raises Diverged if a loss is not finite.
        """
        self._progress.advance(num_steps - self.num_steps)
        self.num_steps = num_steps
        self._ends_of_rounds.append((self.trained_s, num_steps))
        if self._recipe is None or self._test is not None:
            return False
        over = [number for number, end in enumerate(self._ends) if end <= num_steps]
        epoch = over[-1] if over and over[-1] >= len(self.epochs) else None
        is_due = self._every is not None and num_steps // self._every > self._tested // self._every
        if epoch is None and not is_due:
            return False
        self._tested = num_steps
        self._test = Test(exchange, num_steps, epoch, set(there), time.monotonic())
        if self._samples is None or not there:
            self._end_test(self._test)
            return False
        return True

    def tested(self, worker: int, exchange: int, found: Tested) -> None:
        """Take a worker's part of the test after an exchange."""
        test = self._test
        if test is None or test.exchange != exchange or worker not in test.expected:
            return  # of a test that went on without it
        test.expected.discard(worker)
        test.found.append(found)
        if not test.expected:
            self._end_test(test)

    def drop(self, worker: int) -> None:
        """Go on without a worker: what it was to test is left out."""
        test = self._test
        if test is not None and worker in test.expected:
            test.expected.discard(worker)
            if not test.expected:
                self._end_test(test)

    def _end_test(self, test: Test) -> None:
        self._test = None
        self._tests_s += time.monotonic() - test.began_s
        count = sum(one.num_samples for one in test.found)
        loss = sum(one.loss for one in test.found) / count if count else None
        score = None
        if count and self._recipe is not None and self._recipe.score is not None:
            score = sum(one.score for one in test.found) / count
        found = Evaluation(test.num_steps, loss, score)
        if self._every is not None:
            self.evaluations.append(found)
        if test.ends_epoch is None:
            self._progress.evaluation(found, self._score)
            return
        for number in range(len(self.epochs), test.ends_epoch + 1):
            self._end_epoch(number, found)

    def _end_epoch(self, number: int, found: Evaluation) -> None:
        samples, total = self._losses.pop(number, (0, 0.0))
        train_loss = total / max(1, samples)
        if not (isfinite(train_loss) and isfinite(found.test_loss or 0.0)):
            rate = "" if self._rate is None else f"with {self._rate:g} "
            raise Diverged(
                "learning_rate",
                f"{rate}the training loss is {train_loss} and the test loss "
                f"{found.test_loss} after epoch {number + 1}",
                hint="choose a smaller one",
            )
        seconds = self.trained_s - sum(one.seconds for one in self.epochs)
        epoch = Epoch(number, train_loss, found.test_loss, found.score, max(0.0, seconds))
        self.epochs.append(epoch)
        self._progress.epoch(epoch, self._score)

    def show(self, num_workers: int) -> None:
        """Show loss and throughput beside the bar."""
        if len(self._ends_of_rounds) < 2:
            return
        (start_s, before), (end_s, after) = self._ends_of_rounds[-2:]
        rate = (after - before) * self._samples_per_step / max(1e-9, end_s - start_s)
        tokens = f", {rate * self._tokens:,.0f} tokens/s" if self._tokens else ""
        self._progress.status(
            f"loss {self._last_loss:.4g}, {rate:,.0f} samples/s{tokens}, {num_workers} workers"
        )
