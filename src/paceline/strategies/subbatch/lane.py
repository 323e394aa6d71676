"""The exchanges of a rank: begun in one order on all ranks, waited for by a thread of their own.

main thread    [encode, post 0][encode, post 1][compute ...        ]
lane                           [wait, decode 0][wait, decode 1]
"""

import atexit
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.links.group import Group

_GOODBYE_S = 5.0
Flight = Future[Tensor]


class Pending(Protocol):
    """An exchange that is under way."""

    def wait(self) -> Tensor:
        """Return its values, once."""
        ...


@dataclass(frozen=True)
class Joined:
    """A collective of torch that is under way, and the values that it will have changed."""

    work: dist.Work
    values: Tensor

    def wait(self) -> Tensor:
        """Return the values when it is done."""
        self.work.wait()
        return self.values


class Lane:
    """Waits for exchanges in the order in which they were begun, beside what the rank computes.

    All ranks make it together, and begin the same exchanges in the same order. No wait is longer
    than the group's deadline. After a failure all later exchanges fail, too: this rank's next
    one would meet the others' last. `waits` says whether each is over before the next begins.
    """

    def __init__(self, group: Group) -> None:
        self._device = group.device
        self.process_group: dist.ProcessGroup | None = None
        self.waits = False
        self._queue: queue.SimpleQueue[tuple[Flight, Pending, Callable[[], None]] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None
        if group.world_size == 1:
            return
        self.process_group = dist.new_group(
            timeout=timedelta(seconds=group.deadline_s),
            backend="gloo" if group.device.type == "cpu" else None,
        )
        self._thread = threading.Thread(target=self._wait, name="subbatch", daemon=True)
        self._thread.start()
        # A thread that the interpreter ends within torch takes the process down with it.
        atexit.register(self.close)

    @contextmanager
    def one_by_one(self) -> Iterator[None]:
        """Within it an exchange is over before the next computation begins, for a profile."""
        self.waits = True
        yield
        self.waits = False

    def begin(
        self, post: Callable[[], Pending], done: Callable[[float, float], None] = lambda *_: None
    ) -> Flight:
        """Post an exchange and return what will have its values.

        `done` learns when it began and ended, in seconds of this host's clock, before anybody
        else learns that it did.
        """
        flight: Flight = Future()
        started = time.monotonic()
        pending = post()
        if self._thread is None:
            flight.set_result(pending.wait())
            return flight
        self._queue.put((flight, pending, lambda: done(started, time.monotonic())))
        if self.waits:
            flight.exception()  # waits; who wants the values gets the error
        return flight

    def close(self) -> None:
        """End the thread, after what has begun; one that waits for a lost rank is left behind."""
        atexit.unregister(self.close)
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(_GOODBYE_S)
            self._thread = None

    def _wait(self) -> None:
        failure: Exception | None = None
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            torch.cuda.set_device(self._device)
        stream = torch.cuda.stream(torch.cuda.Stream(self._device)) if on_gpu else nullcontext()
        with stream:
            for flight, pending, done in iter(self._queue.get, None):
                try:
                    if failure is not None:
                        raise failure
                    values = pending.wait()
                    if on_gpu:  # so that no other thread has to order its stream after this one
                        torch.cuda.current_stream(self._device).synchronize()
                except Exception as error:
                    failure = error
                    flight.set_exception(error)
                else:
                    done()
                    flight.set_result(values)
