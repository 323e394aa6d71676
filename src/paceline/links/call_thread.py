"""A background thread that makes calls in order."""

import atexit
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from paceline.links.devices import device_of

T = TypeVar("T")
_CLOSE_S = 5.0  # longest wait for the thread's end; a thread that waits for a lost rank never ends
_CPU = torch.device("cpu")


class CallThread:
    """A thread that makes calls in order, on a separate stream of the device.

    Unlike a thread of a ThreadPoolExecutor, it does not keep the process alive while it waits for a
    lost rank. By default, all calls after a failed call fail with the same error, because their
    collectives would not match the other ranks' collectives. `goes_on`: if True, make later calls
    even after a failed call.
    """

    def __init__(self, name: str, device: torch.device = _CPU, *, goes_on: bool = False) -> None:
        self._device, self._goes_on, self._has_failed = device_of(device), goes_on, False
        self._calls = queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        # Close before the interpreter exits: a daemon thread inside torch would abort the process.
        atexit.register(self.close)

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Queue a call after the earlier calls; return a future of the call's result."""
        future: Future[T] = Future()
        self._calls.put((future, call))
        return future

    def close(self, within_s: float | None = _CLOSE_S) -> bool:
        """End the thread after the queued calls; stop waiting for it after `within_s`.

        Returns whether all calls have succeeded.
        """
        atexit.unregister(self.close)
        self._calls.put(None)
        self._thread.join(within_s)
        return not (self._has_failed or self._thread.is_alive())

    def end_with(self, owner: object) -> None:
        """End the thread, after the queued calls, when `owner` is garbage-collected."""
        weakref.finalize(owner, self._calls.put, None).atexit = False

    def _run(self) -> None:
        own, failure = self._device, None
        with own.use(own.new_stream() if own.is_asynchronous else None):
            for future, call in iter(self._calls.get, None):
                try:
                    if failure is not None:
                        raise failure
                    future.set_result(call())
                except BaseException as error:
                    self._has_failed = True
                    failure = None if self._goes_on else error
                    future.set_exception(error)
                del future, call  # free the call's tensors before waiting for the next call


def finish_stream(device: torch.device) -> None:
    """Wait for the current stream of `device`, so that other streams can use its results."""
    own = device_of(device)
    if own.is_asynchronous:
        own.current_stream().synchronize()
