"""Let threads take turns on one device, in a fixed order (Du et al. 2017, figure 3).

A lane is a function that runs in one of these threads.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from paceline.links.devices import Device

_POLL_S = 0.5


class LaneStopped(Exception):
    """Stops a lane because another lane has failed."""


class Turns:
    """Lets one lane (thread) at a time use a device, in a fixed order that lanes can leave."""

    def __init__(self, lanes: Sequence[int]) -> None:
        self._order = list(lanes)
        self._condition = threading.Condition()
        self._stopped = False

    @contextmanager
    def of(self, lane: int) -> Iterator[None]:
        """Wait for the turn of `lane`, which lasts until the end of the block."""
        self._take(lane)
        try:
            yield
        finally:
            self._pass_on(lane)

    def let_others(self, lane: int) -> None:
        """End the turn of `lane`, and wait for its next turn."""
        self._pass_on(lane)
        self._take(lane)

    def leave(self, lane: int) -> None:
        """Remove `lane` from the order. If the lane later requests a turn, it is appended."""
        with self._condition:
            if lane in self._order:
                self._order.remove(lane)
            self._condition.notify_all()

    def stop(self) -> None:
        """Stop all lanes: a lane that waits for a turn raises LaneStopped."""
        with self._condition:
            self._stopped = True
            self._condition.notify_all()

    def check(self) -> None:
        """Raise LaneStopped if the lanes must stop."""
        if self._stopped:
            raise LaneStopped

    def _take(self, lane: int) -> None:
        # This wait needs no deadline: the lane whose turn it is waits only for the hub (parameter
        # server), with a deadline, and a lane that fails stops the other lanes.
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
        """Run each lane in a thread; if a lane fails, stop all lanes and raise its error."""
        failures: list[Exception] = []
        num_threads = torch.get_num_threads()

        def run(lane: Callable[[], None]) -> None:
            torch.set_num_threads(num_threads)  # PyTorch has this setting per thread
            try:
                with device.use():  # the current device is per thread, too
                    lane()
            except LaneStopped:
                return
            except Exception as error:  # raised again by the calling thread
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
