"""The lanes of a device take turns: what computes on it never overlaps, in a fixed order."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_LOOK_EVERY_S = 1.0


class Stopped(Exception):
    """The other lanes are not to go on, for one of them has failed."""


class Turns:
    """Whose turn it is, among the lanes of one device.

    A lane that has nothing more to do leaves, and a failure of one stops all.
    """

    def __init__(self, lanes: Sequence[int]) -> None:
        self._order = list(lanes)
        self._condition = threading.Condition()
        self._stopped = False

    @contextmanager
    def of(self, lane: int) -> Iterator[None]:
        """Wait for the lane's turn, and have it last as long as what runs inside."""
        self._take(lane)
        try:
            yield
        finally:
            self._pass_on(lane)

    def let_others(self, lane: int) -> None:
        """Give a turn away that the lane cannot use now, and return when its next one has come."""
        self._pass_on(lane)
        self._take(lane)

    def leave(self, lane: int) -> None:
        """Have no more turns, until one is asked for again: then the last in the order."""
        with self._condition:
            if lane in self._order:
                self._order.remove(lane)
            self._condition.notify_all()

    def stop(self) -> None:
        """Have no lane take another turn: those that wait for one raise Stopped."""
        with self._condition:
            self._stopped = True
            self._condition.notify_all()

    def check(self) -> None:
        """Raise Stopped if the lanes are not to go on."""
        if self._stopped:
            raise Stopped

    def _take(self, lane: int) -> None:
        # The lane whose turn it is waits for nothing without a deadline, and then fails.
        with self._condition:
            if lane not in self._order:
                self._order.append(lane)
            while self._order[0] != lane and not self._stopped:
                self._condition.wait(_LOOK_EVERY_S)
        self.check()

    def _pass_on(self, lane: int) -> None:
        with self._condition:
            if self._order and self._order[0] == lane:
                self._order.append(self._order.pop(0))
            self._condition.notify_all()
