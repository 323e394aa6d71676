"""The fastest of several exchanges, found by measuring real steps while training goes on.

`Trials` measures all of them; all give the same gradients, so training does not depend on it:

step    0 .. 5    6 .. 12       13 .. 18  19 .. 25       26 .. 31  32 .. 38
        settle    are measured  settle    are measured   settle    are measured
        allreduce               tree                     host                    the fastest

`PredictedTrials` begin with the one that was predicted to be the fastest:

steps   0 .. 2    3 .. 14           15 .. 17   18 .. 29
settle    are measured      settle     are measured
first candidate             the next one, if the first was much slower than predicted
and that one was predicted to be faster than it turned out
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
    """Uses exchanges of these names one after another, and then the one with the shortest steps.

    The slowest rank's time of a step counts. All ranks take the same decisions. `name`: of the one
    to use now. `seconds`: of a step, by name.
    """

    num_settling = 6  # in which torch makes its buckets, and host learns when its layers are ready
    num_measured = 6

    def __init__(self, names: Iterable[str], clock: Clock) -> None:
        self._names, self._clock = tuple(names), clock
        self.name = self._names[0]
        self._marks: list[Any] = []
        self.seconds: dict[str, float] = {}
        self._chunks: dict[str, int] = {}  # layers in a chunk while that was measured
        self._failed: dict[str, str] = {}
        self.settled = False

    @property
    def due(self) -> bool:
        """True if enough steps were measured to go on."""
        return not self.settled and len(self._marks) > self.num_settling + self.num_measured

    def exchanged(self) -> None:
        """Record the end of a backward pass whose gradients were exchanged."""
        if not self.settled:
            self._marks.append(self._clock.mark())

    def go_on(self, group: Group, chunk: int | None = None) -> None:
        """Finish measuring this one and choose the next; all ranks call it together.

        `chunk`: the number of layers that were exchanged together, if it has chunks.
        """
        ends = self._clock.seconds(self._marks[self.num_settling :])
        own_s = median(end - start for start, end in pairwise(ends))
        # The slowest rank determines when a step ends.
        self.seconds[self.name] = max(group.gather(own_s))
        if chunk is not None:
            self._chunks[self.name] = chunk
        self._use(self._untried())

    def fail(self, error: InvalidInput) -> None:
        """Go on without this one: it cannot be used here, on any rank."""
        self._failed[self.name] = str(error)
        self._use(self._untried())

    def settle(self) -> None:
        """Try no other one from now on."""
        self._use([])

    def _untried(self) -> list[str]:
        return [one for one in self._names if one not in self.seconds | self._failed]

    def _use(self, left: Sequence[str]) -> None:
        self._marks, self.settled = [], not left
        fastest = min(self.seconds, key=self.seconds.__getitem__, default=self.name)
        self.name = left[0] if left else fastest

    def why(self, chunk: int | None = None, is_searched: bool = False) -> str:
        """Return the method in use, and the measurements that led to it.

        `chunk`: the number of layers that are exchanged together now, which a search has chosen
        since, or is trying if it `is_searched`.
        """
        figures = [self._figure(name) for name in self.seconds]
        problems = [f"{name} cannot be used: {why}" for name, why in self._failed.items()]
        told = "; ".join([*sorted(figures), *problems])
        if not self.settled:
            return f"{self.name}: being tried" + (f"; {told}" if told else "")
        reason = f"{self.name}: the fastest of those measured, by the step: {told}"
        measured = self._chunks.get(self.name)
        if chunk is None or measured is None or chunk == measured:
            return reason
        now = "now trying chunks" if is_searched else "since then in chunks"
        return f"{reason}; {now} of {_layers(chunk)}, of which the figure above is not"

    def _figure(self, name: str) -> str:
        chunk = self._chunks.get(name)
        chunks = "" if chunk is None else f" in chunks of {_layers(chunk)}"
        return f"{name} {duration(self.seconds[name])}{chunks}"


class Candidate(NamedTuple):
    """An exchange: its name, the predicted seconds of a step, and a factory of replicas."""

    name: str
    predicted_s: float
    make: Callable[[], ModelReplica]


class PredictedTrials(Trials):
    """Uses the first exchange, and tries the next if steps take longer than `predicted`.

    They do if they exceed the prediction by more than the share `tolerance`; another one is tried
    only if it was predicted to be faster than that.
    """

    num_settling = 2  # in which torch makes its buckets, and caches fill
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
    """A replica by the candidate that `PredictedTrials` use now.

    `on_decision` is called with the reason of each change. All ranks change together, and never
    after `num_steps`. `clock` is that of the device, which may be far behind the host. A step that
    `accumulates` micro-batches begins with its `no_sync`.
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
        """The candidate in use."""
        return self._used.name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward pass; a step begins with it."""
        if torch.is_grad_enabled() and not self._accumulates:
            self._begin_step()
        return self._replica(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Begin a step; return the context of its micro-batches but the last."""
        self._begin_step()
        return self._replica.no_sync()

    def prepare(self, run: Callable[[], None]) -> None:
        """Have the candidate in use prepare itself."""
        self._replica.prepare(run)

    def statistics(self) -> Statistics:
        """Return the traffic and time of the candidate in use."""
        return self._replica.statistics()

    def exchange_state(self) -> dict[str, Tensor]:
        """Return what the candidate in use remembers."""
        return self._replica.exchange_state()

    def load_exchange_state(self, state: dict[str, Tensor]) -> None:
        """Have the candidate in use take over what it has remembered."""
        self._replica.load_exchange_state(state)

    def record(self, recorder: Recorder | None) -> None:
        """Record all exchanges from now on, of whichever candidate."""
        self._recorder = recorder
        self._replica.record(recorder)

    def close(self) -> None:
        """Free the resources of the candidate in use."""
        self._replica.close()

    def _begin_step(self) -> None:
        trials = self._trials
        if trials.settled:
            return
        trials.exchanged()
        self._num_steps += 1
        num_left = self._last_step - self._num_steps
        if trials.due:
            trials.go_on(self._group)
            num_left -= trials.num_settling + trials.num_measured + 1  # of another trial
        if num_left < 0:
            trials.settle()
        self._follow()

    def _follow(self) -> None:
        """Use what the trials use now, and say why."""
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
                f"auto: {before.name} takes {duration(seconds[before.name])} a step, and not "
                f"{duration(before.predicted_s)} as predicted; trying {used.name}, predicted to "
                f"take {duration(used.predicted_s)}"
            )
        self._replica.close()  # before the other is made: they hook the same gradients
        self._use(used)

    def _use(self, candidate: Candidate) -> None:
        self._used = candidate
        self._replica = candidate.make()
        if self._recorder is not None:
            self._replica.record(self._recorder)


def _layers(count: int) -> str:
    return f"{count} layer{'s' * (count > 1)}"
