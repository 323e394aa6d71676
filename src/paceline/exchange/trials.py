"""The fastest of several exchanges, found by measuring real steps while training goes on.

`Trials` measures all of them; all give the same gradients, so training does not depend on it:

step    0 .. 5    6 .. 12       13 .. 18  19 .. 25       26 .. 31  32 .. 38
        settle    are measured  settle    are measured   settle    are measured
        allreduce               tree                     host                    the fastest

`Checked` begins with the one that was predicted to be the fastest:

steps   0 .. 2    3 .. 14           15 .. 17   18 .. 29
settle    are measured      settle     are measured
first candidate             the next one, if the first was much slower than predicted
and that one was predicted to be faster than it turned out
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.core.durations import duration
from paceline.core.errors import InvalidInput
from paceline.exchange.replica import Method, ModelReplica, Statistics
from paceline.links.clock import Clock
from paceline.links.group import Group
from paceline.record.recorder import Recorder

_NUM_SETTLING = 6  # in which torch makes its buckets, and host learns when its layers are ready
_NUM_MEASURED = 6
_NUM_CHECKED_SETTLING = 2  # in which torch makes its buckets, and caches fill
_NUM_CHECKED = 8


class Trials:
    """Uses the methods one after another, and then the one with the shortest steps.

    The slowest rank's time of a step counts. All ranks take the same decisions.
    """

    def __init__(self, methods: Sequence[Method], clock: Clock) -> None:
        self._methods, self._clock = tuple(methods), clock
        self.method = self._methods[0]  # the one to use now
        self._marks: list[Any] = []
        self._seconds: dict[str, float] = {}  # of a step, by the method's name
        self._chunks: dict[str, int] = {}  # layers in a chunk while that was measured
        self._failed: dict[str, str] = {}
        self.settled = False

    @property
    def due(self) -> bool:
        """True if enough steps were measured to go on."""
        return not self.settled and len(self._marks) > _NUM_SETTLING + _NUM_MEASURED

    def exchanged(self) -> None:
        """Record the end of a backward pass whose gradients were exchanged."""
        if not self.settled:
            self._marks.append(self._clock.mark())

    def go_on(self, group: Group, chunk: int | None = None) -> None:
        """Finish measuring this method and choose the next; all ranks call it together.

        `chunk`: the number of layers that were exchanged together, if the method has chunks.
        """
        ends = self._clock.seconds(self._marks[_NUM_SETTLING:])
        own_s = median(end - start for start, end in pairwise(ends))
        # The slowest rank determines when a step ends.
        self._seconds[self.method.name] = max(group.gather(own_s))
        if chunk is not None:
            self._chunks[self.method.name] = chunk
        self._next()

    def fail(self, error: InvalidInput) -> None:
        """Go on without this method: it cannot be used here, on any rank."""
        self._failed[self.method.name] = str(error)
        self._next()

    def _next(self) -> None:
        self._marks = []
        tried = self._seconds.keys() | self._failed.keys()
        left = [one for one in self._methods if one.name not in tried]
        self.settled = not left
        measured = [one for one in self._methods if one.name in self._seconds]
        self.method = left[0] if left else min(measured, key=lambda one: self._seconds[one.name])

    def why(self, chunk: int | None = None, is_searched: bool = False) -> str:
        """Return the method in use, and the measurements that led to it.

        `chunk`: the number of layers that are exchanged together now, which a search has chosen
        since, or is trying if it `is_searched`.
        """
        figures = [self._figure(name) for name in self._seconds]
        problems = [f"{name} cannot be used: {why}" for name, why in self._failed.items()]
        told = "; ".join([*sorted(figures), *problems])
        if not self.settled:
            return f"{self.method.name}: being tried" + (f"; {told}" if told else "")
        reason = f"{self.method.name}: the fastest of those measured, by the step: {told}"
        measured = self._chunks.get(self.method.name)
        if chunk is None or measured is None or chunk == measured:
            return reason
        now = "now trying chunks" if is_searched else "since then in chunks"
        return f"{reason}; {now} of {_layers(chunk)}, of which the figure above is not"

    def _figure(self, name: str) -> str:
        chunk = self._chunks.get(name)
        chunks = "" if chunk is None else f" in chunks of {_layers(chunk)}"
        return f"{name} {duration(self._seconds[name])}{chunks}"


class Candidate(NamedTuple):
    """An exchange: its name, the predicted seconds of a step, and a factory of replicas."""

    name: str
    predicted_s: float
    make: Callable[[], ModelReplica]


class Checked:
    """Uses the first candidate, and tries the next if steps take longer than predicted.

    They do if they exceed the prediction by more than the share `tolerance`; a candidate is tried
    only if it was predicted to be faster than that. In the end the one with the shortest steps is
    used. `on_decision` is called with the reason of each change. All ranks change together, by the
    times of the slowest rank, and never after `num_steps`. `clock` is that of the device, which may
    be far behind the host. A step that `accumulates` micro-batches begins with its `no_sync`.
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
        self._candidates, self._group, self._tolerance = candidates, group, tolerance
        self._clock = clock
        self._last_step, self._on_decision = num_steps, on_decision
        self._recorder: Recorder | None = None
        self._use(candidates[0])
        self._measured: dict[str, float] = {}  # seconds of a step, by the candidate's name
        self._num_steps = 0
        self._accumulates = accumulates
        self._settled = len(candidates) == 1
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
        if self._settled:
            return
        self._starts.append(self._clock.mark())
        self._num_steps += 1
        if len(self._starts) > _NUM_CHECKED_SETTLING + _NUM_CHECKED:
            self._judge()
        elif self._num_steps > self._last_step:
            self._settle()

    def _judge(self) -> None:
        starts = self._clock.seconds(self._starts[_NUM_CHECKED_SETTLING:])
        own = median(end - start for start, end in pairwise(starts))
        now, first = self._used, self._candidates[0]
        self._measured[now.name] = max(self._group.gather(own))
        fastest_s = min(self._measured.values())
        was_right = fastest_s <= (1 + self._tolerance) * first.predicted_s
        left = [one for one in self._candidates if one.name not in self._measured]
        faster = [one for one in left if one.predicted_s < fastest_s]
        room = self._last_step - self._num_steps > _NUM_CHECKED_SETTLING + _NUM_CHECKED
        if (now is first and was_right) or not faster or not room:
            self._settle()
            return
        other = faster[0]
        self._on_decision(
            f"auto: {now.name} takes {duration(self._measured[now.name])} a step, and not "
            f"{duration(now.predicted_s)} as predicted; trying {other.name}, predicted to take "
            f"{duration(other.predicted_s)}"
        )
        self._replica.close()  # before the other is made: they hook the same gradients
        self._use(other)

    def _settle(self) -> None:
        self._settled = True
        measured = [one for one in self._candidates if one.name in self._measured]
        best = min(measured, key=lambda one: self._measured[one.name], default=self._used)
        if len(measured) > 1:
            self.num_searched = self._num_steps - 1
            took = [f"{name} {duration(took_s)}" for name, took_s in self._measured.items()]
            self._on_decision(f"auto: {best.name} from now on; measured {', '.join(took)}")
        if best is not self._used:
            self._replica.close()
            self._use(best)

    def _use(self, candidate: Candidate) -> None:
        self._used, self._starts = candidate, list[Any]()
        self._replica = candidate.make()
        if self._recorder is not None:
            self._replica.record(self._recorder)


def _layers(count: int) -> str:
    return f"{count} layer{'s' * (count > 1)}"
