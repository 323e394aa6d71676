"""Let threads take turns on one device, in a fixed order (Du et al. 2017, figure 3)."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from paceline.links.devices.device import Device

_POLL_S = 0.5


class Stopped(Exception):
    """The lanes must stop, because another one has failed."""


class Turns:
    """Gives the lanes of a device turns in a fixed order; a lane can leave, or stop all."""

    def __init__(self, lanes: Sequence[int]) -> None:
        self._order = list(lanes)
        self._condition = threading.Condition()
        self._stopped = False

    @contextmanager
    def of(self, lane: int) -> Iterator[None]:
        """Wait for the lane's turn, which lasts until the end of the block."""
        self._take(lane)
        try:
            yield
        finally:
            self._pass_on(lane)

    def let_others(self, lane: int) -> None:
        """Give up the lane's turn, and wait for its next one."""
        self._pass_on(lane)
        self._take(lane)

    def leave(self, lane: int) -> None:
        """Leave the order; a lane that asks again is appended to it."""
        with self._condition:
            if lane in self._order:
                self._order.remove(lane)
            self._condition.notify_all()

    def stop(self) -> None:
        """End all turns: waiting lanes raise Stopped."""
        with self._condition:
            self._stopped = True
            self._condition.notify_all()

    def check(self) -> None:
        """Raise Stopped if the lanes must stop."""
        if self._stopped:
            raise Stopped

    def _take(self, lane: int) -> None:
        # No deadline is needed: the lane with the turn waits only for the hub, which has one, and
        # stops the others if it fails.
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
        """Run each lane in a thread until all end; raise the first failure, which stops all."""
        failures: list[Exception] = []
        num_threads = torch.get_num_threads()

        def run(lane: Callable[[], None]) -> None:
            torch.set_num_threads(num_threads)  # a setting of each thread
            try:
                with device.use():  # so is the current device
                    lane()
            except Stopped:
                return
            except Exception as error:  # raised again in the main thread
                failures.append(error)
                self.stop()

        running = [
            threading.Thread(target=run, args=(lane,), name=f"paceline-lane-{number}", daemon=True)
            for number, lane in lanes.items()
        ]
        for thread in running:
            thread.start()
        for thread in running:
            # Use a timeout, because Python handles a signal only between two waits.
            while thread.is_alive():
                thread.join(_POLL_S)
        if failures:
            raise failures[0]
