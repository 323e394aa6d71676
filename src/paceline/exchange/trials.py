"""Which exchange is the fastest: a few real steps of each, in turn, while training goes on.

step    0 .. 5    6 .. 12       13 .. 18  19 .. 25       26 .. 31  32 .. 38
        settle    are measured  settle    are measured   settle    are measured
        allreduce               tree                     host                    the fastest

All give the same gradients, so that training does not depend on what is tried.
"""

from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from paceline.core.errors import InvalidInput
from paceline.exchange.method import Method
from paceline.links.group import Group
from paceline.record.clock import Clock

_NUM_SETTLING = 6  # in which torch makes its buckets, and host learns when its layers are ready
_NUM_MEASURED = 6


class Trials:
    """Takes the methods one after another, and then the one whose steps were the shortest.

    A step counts as long as on the slowest rank. All ranks take the same decisions.
    """

    def __init__(self, methods: Sequence[Method], clock: Clock) -> None:
        self._methods, self._clock = tuple(methods), clock
        self._marks: list[Any] = []
        self._seconds: dict[str, float] = {}
        self._failed: dict[str, str] = {}
        self._number = 0
        self.settled = False

    @property
    def method(self) -> Method:
        """The one to use now."""
        return self._methods[self._number]

    @property
    def due(self) -> bool:
        """Whether enough steps were measured to go on."""
        return not self.settled and len(self._marks) > _NUM_SETTLING + _NUM_MEASURED

    def exchanged(self) -> None:
        """Note the end of a backward pass whose gradients were exchanged."""
        if not self.settled:
            self._marks.append(self._clock.mark())

    def go_on(self, group: Group) -> None:
        """Choose the next method from what this one has taken; all ranks call it together."""
        ends = self._clock.seconds(self._marks[_NUM_SETTLING:])
        own_s = median(end - start for start, end in pairwise(ends))
        self._seconds[self.method.name] = max(group.gather(own_s))
        self._next()

    def fail(self, error: InvalidInput) -> None:
        """Go on without this method: it cannot be used here, on any rank."""
        self._failed[self.method.name] = str(error)
        self._next()

    def _next(self) -> None:
        self._marks = []
        tried = {*self._seconds, *self._failed}
        left = [number for number, one in enumerate(self._methods) if one.name not in tried]
        self.settled = not left
        self._number = left[0] if left else self._best()

    def _best(self) -> int:
        names = [one.name for one in self._methods]
        return names.index(min(self._seconds, key=self._seconds.__getitem__))

    @property
    def why(self) -> str:
        """Say which method is used, and the figures on which that rests."""
        figures = [f"{name} {seconds * 1e3:.3g} ms" for name, seconds in self._seconds.items()]
        problems = [f"{name} cannot be used: {why}" for name, why in self._failed.items()]
        told = "; ".join([*sorted(figures), *problems])
        if self.settled:
            return f"{self.method.name}: the fastest of those measured, by the step: {told}"
        return f"{self.method.name}: being tried" + (f"; {told}" if told else "")
