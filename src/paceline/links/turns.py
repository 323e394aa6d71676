"""Threads that alternate on one device, in a fixed order (Du et al. 2017, figure 3)."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from paceline.links.devices.device import Device

_POLL_S = 0.5


class Stopped(Exception):
    """The other lanes are not to go on, for one of them has failed."""


class Turns:
    """Gives the lanes of one device turns, so that their computation never overlaps there.

    They come in a fixed order. A lane that has nothing more to do leaves, and a failure of one
    stops all.
    """

    def __init__(self, lanes: Sequence[int]) -> None:
        self._order = list(lanes)
        self._condition = threading.Condition()
        self._stopped = False

    @contextmanager
    def of(self, lane: int) -> Iterator[None]:
        """Wait for the lane's turn, which lasts as long as the block."""
        self._take(lane)
        try:
            yield
        finally:
            self._pass_on(lane)

    def let_others(self, lane: int) -> None:
        """Give a turn away that the lane cannot use now, and wait for its next one."""
        self._pass_on(lane)
        self._take(lane)

    def leave(self, lane: int) -> None:
        """Leave the order, until a turn is asked for again: then as the last one."""
        with self._condition:
            if lane in self._order:
                self._order.remove(lane)
            self._condition.notify_all()

    def stop(self) -> None:
        """End all turns: lanes that wait for one raise Stopped."""
        with self._condition:
            self._stopped = True
            self._condition.notify_all()

    def check(self) -> None:
        """Raise Stopped if the lanes are not to go on."""
        if self._stopped:
            raise Stopped

    def _take(self, lane: int) -> None:
        # No deadline of its own: the lane whose turn it is waits for the hub only, which has one,
        # and stops the others when it fails.
        with self._condition:
            if lane not in self._order:
                self._order.append(lane)
            self._condition.wait_for(lambda: self._order[0] == lane or self._stopped)
        self.check()

    def _pass_on(self, lane: int) -> None:
        with self._condition:
            if self._order and self._order[0] == lane:
                self._order.append(self._order.pop(0))
            self._condition.notify_all()

    def run(self, lanes: Mapping[int, Callable[[], None]], device: Device) -> None:
        """Run each lane in a thread, to the end; the first failure ends them all."""
        failures: list[Exception] = []
        num_threads = torch.get_num_threads()

        def run(lane: Callable[[], None]) -> None:
            torch.set_num_threads(num_threads)  # a setting of each thread
            try:
                with device.use():  # so is the current device
                    lane()
            except Stopped:
                return
            except Exception as error:  # raised again below, in the main thread
                failures.append(error)
                self.stop()

        running = [
            threading.Thread(target=run, args=(lane,), name=f"paceline-lane-{number}", daemon=True)
            for number, lane in lanes.items()
        ]
        for thread in running:
            thread.start()
        for thread in running:
            # With a timeout, because a signal is handled between two waits only.
            while thread.is_alive():
                thread.join(_POLL_S)
        if failures:
            raise failures[0]
