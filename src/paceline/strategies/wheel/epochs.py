"""Count updates and epochs at the hub, test the model, and measure the training time."""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from paceline.core.outcome import Epoch, Evaluation
from paceline.exchange.loop import epoch_of, score_of
from paceline.exchange.session import Progress, Status
from paceline.links.clock import TrainingClock
from paceline.strategies.wheel.job import TrainingJob
from paceline.strategies.wheel.staleness import LossSum

_NS = 1e-9
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
        self._tested = 0  # the number of completed steps at the last test
        self._clock, self.status = TrainingClock(), Status(progress, job.recipe.tokens_per_sample)

    @property
    def trained_s(self) -> float:
        """The seconds of training without tests, including training before a resume."""
        return self._clock.at(time.monotonic_ns()) * _NS

    def begin(self) -> None:
        """Start the clock and the progress bar."""
        self._progress.begin(self._all_samples, "samples")
        before_ns = round(sum(epoch.seconds for epoch in self.epochs) / _NS)
        self._clock.restore([before_ns, before_ns])
        self._clock.resume()
        self.status.begin()

    def count(self, losses: Mapping[int, LossSum]) -> None:
        """Count the samples of an update, and add its losses by epoch."""
        for epoch, loss in losses.items():
            self.num_samples += loss.num_samples
            self._losses[epoch] += loss
            self.status.add(loss.num_samples, loss.mean, advances=loss.num_samples)
        self.updates.append((self.trained_s, self.num_samples))

    def test(self, num_steps: int) -> bool:
        """Test the model if a test is due; return whether a test was due.

        `num_steps`: the number of steps that all workers have completed. Also ends the epochs that
        these steps complete. Raises InvalidInput if a loss is not finite.
        """
        was = self._tested
        self._clock.stop()
        is_over = num_steps == self._num_steps and num_steps % self._steps_per_epoch > 0
        while (number := len(self.epochs)) < num_steps // self._steps_per_epoch + is_over:
            self._end_epoch(number)
        if self._every is not None and num_steps // self._every > self._tested // self._every:
            self._evaluate(num_steps)
            self._progress.evaluation(self.evaluations[-1], self._score)
        self._clock.resume()
        return self._tested > was

    def _end_epoch(self, number: int) -> None:
        train_loss = self._losses.pop(number, LossSum()).mean
        found = self._evaluate(min(self._num_steps, (number + 1) * self._steps_per_epoch))
        epoch = epoch_of(number, train_loss, found, self._clock.epoch_ns * _NS)
        self._clock.begin_epoch()
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
