"""A thread that makes calls one after another, beside the thread that asks for them."""

import atexit
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from paceline.links.devices import device_of

T = TypeVar("T")
_CLOSE_S = 5.0  # a thread that waits in a collective for a lost rank does not end by itself
_CPU = torch.device("cpu")


class CallThread:
    """Makes calls in their order, on a stream of its own of the device.

    It is a daemon, unlike an executor's: one that waits for a lost rank must not keep the process
    alive. After a call that has failed all later ones fail with its error, as the next collective
    would match another of the other ranks; or they are made, if it `goes_on`.
    """

    def __init__(self, name: str, device: torch.device = _CPU, *, goes_on: bool = False) -> None:
        self._device, self._goes_on = device_of(device), goes_on
        self._calls = queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        # A daemon thread that is killed inside torch at interpreter exit aborts the process.
        atexit.register(self.close)

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Make the call after those before it."""
        future: Future[T] = Future()
        self._calls.put((future, call))
        return future

    def close(self, within_s: float | None = _CLOSE_S) -> None:
        """End the thread after the calls that it has; one that takes longer is left behind."""
        atexit.unregister(self.close)
        self._calls.put(None)
        self._thread.join(within_s)

    def _run(self) -> None:
        own, failure = self._device, None
        with own.use(own.new_stream() if own.is_asynchronous else None):
            for future, call in iter(self._calls.get, None):
                try:
                    if failure is not None:
                        raise failure
                    future.set_result(call())
                except Exception as error:
                    failure = None if self._goes_on else error
                    future.set_exception(error)


def finish_stream(device: torch.device) -> None:
    """Synchronise in this thread, so that no other thread must order its streams after ours."""
    own = device_of(device)
    if own.is_asynchronous:
        own.current_stream().synchronize()
