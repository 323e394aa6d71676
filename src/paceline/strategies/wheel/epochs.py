"""Count updates and epochs at the hub, test the model, and measure the training time."""

import time
from bisect import bisect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from paceline.core.outcome import Epoch, Evaluation
from paceline.exchange.loop import epoch_of, score_of
from paceline.exchange.session import Progress
from paceline.strategies.wheel.job import TrainingJob
from paceline.strategies.wheel.server import ParameterServer
from paceline.strategies.wheel.staleness import LossSum

_RATE_WINDOW_S = 10.0
Test = Callable[[], tuple[float | None, float | None]]


class EpochLog:
    """Records updates, and tests the model after each epoch and every `evaluate_every` steps.

    `test` returns the mean loss and the score on the test samples; None: the model is not tested.
    `epochs`: in a resumed run, the epochs that were completed before.
    """

    def __init__(
        self,
        job: TrainingJob,
        progress: Progress,
        test: Test | None = None,
        evaluate_every: int | None = None,
        epochs: Sequence[Epoch] = (),
    ) -> None:
        self._num_steps, self._steps_per_epoch = job.spec.num_steps, job.steps_per_epoch
        num_parts = job.steps_per_epoch * job.spec.place[1]
        self._all_samples = len(job.recipe.samples) * self._num_steps // num_parts
        self._score, self._progress = score_of(job.recipe), progress
        self._test, self._every = test, evaluate_every
        self.epochs, self.evaluations = [*epochs], list[Evaluation]()
        self.num_samples = 0
        self.updates: list[tuple[float, int]] = []  # seconds and samples so far, at each update
        self._losses: defaultdict[int, LossSum] = defaultdict(LossSum)  # of each unfinished epoch
        self._before_s = self._epochs_s
        self._began_s = self._paused_s = 0.0
        self._tested = 0  # the number of completed steps at the last test

    @property
    def _epochs_s(self) -> float:
        return sum(epoch.seconds for epoch in self.epochs)

    @property
    def trained_s(self) -> float:
        """The seconds of training without tests, including training before a resume."""
        since_s = time.monotonic() - self._began_s - self._paused_s if self._began_s else 0.0
        return self._before_s + since_s

    def begin(self) -> None:
        """Start the clock and the progress bar."""
        self._progress.begin(self._all_samples, "samples")
        self._began_s = time.monotonic()

    def count(self, losses: Mapping[int, LossSum]) -> None:
        """Count the samples of an update, and add its losses by epoch."""
        for epoch, loss in losses.items():
            self.num_samples += loss.num_samples
            self.updates.append((self.trained_s, self.num_samples))
            self._losses[epoch] += loss
            self._progress.advance(loss.num_samples)

    def test(self, num_steps: int) -> bool:
        """Test the model if a test is due; return whether a test was due.

        `num_steps`: the number of steps that all workers have completed. Also ends the epochs that
        these steps complete. Raises InvalidInput if a loss is not finite.
        """
        started_s, seconds, was = time.monotonic(), self.trained_s - self._epochs_s, self._tested
        is_over = num_steps == self._num_steps and num_steps % self._steps_per_epoch > 0
        while (number := len(self.epochs)) < num_steps // self._steps_per_epoch + is_over:
            self._end_epoch(number, seconds)
            seconds = 0.0
        if self._every is not None and num_steps // self._every > self._tested // self._every:
            self._evaluate(num_steps)
            self._progress.evaluation(self.evaluations[-1], self._score)
        self._paused_s += time.monotonic() - started_s
        return self._tested > was

    def _end_epoch(self, number: int, seconds: float) -> None:
        loss = self._losses.pop(number, LossSum())
        train_loss = loss.total / max(1, loss.num_samples)
        found = self._evaluate(min(self._num_steps, (number + 1) * self._steps_per_epoch))
        epoch = epoch_of(number, train_loss, found, seconds)
        self.epochs.append(epoch)
        if self._test is not None:
            self._progress.epoch(epoch, self._score)

    def _evaluate(self, num_steps: int) -> Evaluation:
        self._tested = max(self._tested, num_steps)
        tested = (None, None) if self._test is None else self._test()
        found = Evaluation(num_steps, *tested)
        if self._every is not None:
            self.evaluations.append(found)
        return found

    def show(self, server: ParameterServer, nbytes: int) -> None:
        """Show recent training speed, number of workers, staleness, and the bytes so far."""
        since_s = max(self._before_s, self.trained_s - _RATE_WINDOW_S)
        first = bisect(self.updates, since_s, key=lambda update: update[0])
        samples = self.num_samples - (self.updates[first - 1][1] if first else 0)
        if samples:
            self._progress.status(
                f"update {server.version:,}: {samples / (self.trained_s - since_s):,.0f} "
                f"samples/s, {len(server.workers.live)} workers, staleness "
                f"{server.updates.mean_staleness:.1f}, {nbytes / 1e6:,.0f} MB so far"
            )
