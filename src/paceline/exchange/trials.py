"""Find the fastest of several exchanges by measuring training steps.

`Trials` measures all of them; they compute the same gradients, so training is not affected:

step    0 .. 5    6 .. 12       13 .. 18  19 .. 25       26 .. 31  32 .. 38
        settle    are measured  settle    are measured   settle    are measured
        allreduce               tree                     host                    the fastest

`PredictedTrials` starts with the one predicted to be fastest:

step    0, 1    2 .. 9         10 .. 12  13 .. 20
        settle  are measured   settle    are measured
        first candidate        next candidate, if the first one was much slower than
                               predicted, and slower than the next one's prediction
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.core.durations import duration
from paceline.core.errors import InvalidInput
from paceline.exchange.replica import ModelReplica, Statistics
from paceline.links.clock import Clock
from paceline.links.group import Group
from paceline.record.recorder import Recorder


class Trials:
    """Measures the named exchanges in turn, and then uses the fastest.

    All ranks use the slowest rank's times, and so choose equally. `name`: current exchange.
    `seconds`: step time by name.
    """

    num_settling = 6  # warm-up steps: torch rebuilds buckets, host learns the order of readiness
    num_measured = 6

    def __init__(self, names: Iterable[str], clock: Clock) -> None:
        self._names, self._clock = tuple(names), clock
        self.name = self._names[0]
        self._marks: list[Any] = []
        self.seconds: dict[str, float] = {}
        self._chunks: dict[str, int] = {}  # layers per chunk during the measurement
        self._failed: dict[str, str] = {}
        self.settled = False

    @property
    def due(self) -> bool:
        """Whether enough steps were measured."""
        return not self.settled and len(self._marks) > self.num_settling + self.num_measured

    def exchanged(self) -> None:
        """Record the end of a backward pass with an exchange."""
        if not self.settled:
            self._marks.append(self._clock.mark())

    def finish_measurement(self, group: Group, chunk: int | None = None) -> None:
        """Finish a measurement with chunks of `chunk` layers, and choose the next exchange.

        Collective.
        """
        ends = self._clock.seconds(self._marks[self.num_settling :])
        own_s = median(end - start for start, end in pairwise(ends))
        self.seconds[self.name] = max(group.gather(own_s))
        if chunk is not None:
            self._chunks[self.name] = chunk
        self._use(self._untried())

    def fail(self, error: InvalidInput) -> None:
        """Exclude the current exchange, which raised an error."""
        self._failed[self.name] = str(error)
        self._use(self._untried())

    def settle(self) -> None:
        """Use the fastest exchange measured so far."""
        self._use([])

    def _untried(self) -> list[str]:
        return [one for one in self._names if one not in self.seconds | self._failed]

    def _use(self, left: Sequence[str]) -> None:
        self._marks, self.settled = [], not left
        fastest = min(self.seconds, key=self.seconds.__getitem__, default=self.name)
        self.name = left[0] if left else fastest

    def why(self, chunk: int | None = None, is_searched: bool = False) -> str:
        """Describe the exchange in use and the measurements.

        `chunk`: current layers per chunk; `is_searched`: whether a chunk search is running.
        """
        figures = [self._figure(name) for name in self.seconds]
        problems = [f"{name} failed: {why}" for name, why in self._failed.items()]
        found = "; ".join([*sorted(figures), *problems])
        if not self.settled:
            return f"{self.name}: being measured" + (f"; {found}" if found else "")
        reason = f"{self.name}: the fastest measured step: {found}"
        measured = self._chunks.get(self.name)
        if chunk is None or measured is None or chunk == measured:
            return reason
        now = "now trying chunks of" if is_searched else "now in chunks of"
        return f"{reason}; {now} {_layers(chunk)}, unlike when measured"

    def _figure(self, name: str) -> str:
        chunk = self._chunks.get(name)
        chunks = "" if chunk is None else f" in chunks of {_layers(chunk)}"
        return f"{name} {duration(self.seconds[name])}{chunks}"


class Candidate(NamedTuple):
    """A candidate exchange: name, predicted step, and factory of replicas."""

    name: str
    predicted_s: float
    make: Callable[[], ModelReplica]


class PredictedTrials(Trials):
    """Uses the first candidate, unless its steps exceed the prediction by `tolerance`.

    Then it measures the candidates that were predicted to be faster than the measured steps.
    """

    num_settling = 2  # warm-up steps
    num_measured = 8

    def __init__(self, predicted: Mapping[str, float], clock: Clock, tolerance: float) -> None:
        super().__init__(predicted, clock)
        self._predicted, self._tolerance = predicted, tolerance
        self.settled = len(predicted) == 1

    def _untried(self) -> list[str]:
        first, fastest_s = self._names[0], min(self.seconds.values())
        if self.name == first and fastest_s <= (1 + self._tolerance) * self._predicted[first]:
            return []
        return [one for one in super()._untried() if self._predicted[one] < fastest_s]


class Checked:
    """A replica that uses the current candidate of `PredictedTrials`.

    `on_decision(reason)` is called for each change. All ranks change together, at the latest after
    `num_steps`. `clock`: the device's clock, which may be late. `accumulates`: steps begin with
    `no_sync` micro-batches.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        group: Group,
        clock: Clock,
        tolerance: float,
        num_steps: int,
        on_decision: Callable[[str], None],
        accumulates: bool = False,
    ) -> None:
        self._candidates = {one.name: one for one in candidates}
        predicted = {one.name: one.predicted_s for one in candidates}
        self._trials = PredictedTrials(predicted, clock, tolerance)
        self._group, self._last_step, self._on_decision = group, num_steps, on_decision
        self._recorder: Recorder | None = None
        self._use(candidates[0])
        self._num_steps = 0
        self._accumulates = accumulates
        self.num_searched = 0

    @property
    def name(self) -> str:
        """The current candidate's name."""
        return self._used.name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Begin a step, and run the module."""
        if torch.is_grad_enabled() and not self._accumulates:
            self._begin_step()
        return self._replica(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Begin a step; return the context of all micro-batches except the last."""
        self._begin_step()
        return self._replica.no_sync()

    def prepare(self, run: Callable[[], None]) -> None:
        """Call the current candidate's `prepare`."""
        self._replica.prepare(run)

    def statistics(self) -> Statistics:
        """Return the current candidate's statistics."""
        return self._replica.statistics()

    def exchange_state(self) -> dict[str, Tensor]:
        """Return the current candidate's exchange state."""
        return self._replica.exchange_state()

    def load_exchange_state(self, state: dict[str, Tensor]) -> None:
        """Load the current candidate's exchange state."""
        self._replica.load_exchange_state(state)

    def record(self, recorder: Recorder | None) -> None:
        """Record all exchanges from now on, of any candidate."""
        self._recorder = recorder
        self._replica.record(recorder)

    def close(self) -> None:
        """Free the current candidate's resources."""
        self._replica.close()

    def _begin_step(self) -> None:
        trials = self._trials
        if trials.settled:
            return
        trials.exchanged()
        self._num_steps += 1
        num_left = self._last_step - self._num_steps
        if trials.due:
            trials.finish_measurement(self._group)
            num_left -= trials.num_settling + trials.num_measured + 1  # belongs to another trial
        if num_left < 0:
            trials.settle()
        self._follow()

    def _follow(self) -> None:
        """Switch to the trials' current candidate, and report the reason."""
        trials, before, used = self._trials, self._used, self._candidates[self._trials.name]
        seconds = trials.seconds
        if trials.settled and len(seconds) > 1:
            self.num_searched = self._num_steps - 1
            took = [f"{name} {duration(took_s)}" for name, took_s in seconds.items()]
            self._on_decision(f"auto: {used.name} from now on; measured {', '.join(took)}")
        if used is before:
            return
        if not trials.settled:
            self._on_decision(
                f"auto: {before.name} takes {duration(seconds[before.name])} per step instead of "
                f"the predicted {duration(before.predicted_s)}; trying {used.name} (predicted: "
                f"{duration(used.predicted_s)})"
            )
        self._replica.close()  # before creating another, which hooks the same gradients
        self._use(used)

    def _use(self, candidate: Candidate) -> None:
        self._used = candidate
        self._replica = candidate.make()
        if self._recorder is not None:
            self._replica.record(self._recorder)


def _layers(count: int) -> str:
    return f"{count} layer{'s' * (count > 1)}"
