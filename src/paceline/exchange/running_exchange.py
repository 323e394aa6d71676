"""An exchange of local updates in a background thread, and a log of exchanges."""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from paceline.exchange.averaging import Averaged, Contribution

_KEPT_TIMES = 256  # exchanges kept in the log
NO_EXCHANGE: dict[str, Any] = {
    "due": None,
    "sent": [],
    "buffers": [],
}  # state without a running exchange


class ExchangeTimes(NamedTuple):
    """Times of an exchange, in seconds of the host's monotonic clock.

    The worker trained from `trained_from_s`, copied the fragment to host memory from `sent_s` to
    `copied_s`, exchanged it from `begun_s` to `averaged_s`, and took the outer step until
    `stepped_s`. The group's parameters were due at `due_s`, and loaded from `loading_s` to
    `loaded_s`.
    """

    number: int
    trained_from_s: float
    sent_s: float
    copied_s: float
    begun_s: float
    averaged_s: float
    stepped_s: float
    due_s: float
    loading_s: float
    loaded_s: float


class RunningExchange:
    """An exchange whose result is loaded after inner step `due`.

    `sent_s`: start of copying the contribution `given`. `sent`: the worker's parameters then, as
    one vector, if the worker keeps its own steps.
    """

    def __init__(
        self, given: Contribution, due: int, sent_s: float, sent: Sequence[Tensor] = ()
    ) -> None:
        self.given, self.due, self.sent = given, due, sent
        self._sent_s, self._copied_s = sent_s, time.monotonic()
        self._begun_s = self._averaged_s = self._stepped_s = self._due_s = self._copied_s
        self._thread: threading.Thread | None = None
        self._result: Averaged | None = None
        self._error: BaseException | None = None
        self.exposed_s = 0.0  # seconds that the loop waited

    def state(self) -> dict[str, Any]:
        """Return the finished exchange as plain values and tensors."""
        return {"due": self.due, "sent": self.sent, "buffers": self.given.buffers}

    @classmethod
    def of_state(cls, state: Mapping[str, Any], number: int, fragment: int) -> Self:
        """Restore a finished exchange from its state."""
        given = Contribution(number, fragment, 0.0, torch.empty(0), state["buffers"], False)
        made = cls(given, state["due"], time.monotonic(), state["sent"])
        made._result = Averaged(given, None, 0.0, (), (), all_closing=False)
        return made

    @property
    def took_s(self) -> float:
        """Seconds of the exchange and the outer step."""
        return self._stepped_s - self._begun_s

    def start(
        self, average: Callable[[Contribution], Averaged], step: Callable[[Averaged], None]
    ) -> None:
        """Start the average and outer step in a thread."""
        # daemon, so that waiting for a lost worker does not keep the process alive
        self._thread = threading.Thread(
            target=self._run, args=(average, step), name="paceline-local-updates", daemon=True
        )
        self._thread.start()

    def _run(
        self, average: Callable[[Contribution], Averaged], step: Callable[[Averaged], None]
    ) -> None:
        self._begun_s = time.monotonic()
        try:
            found = average(self.given)
            self._averaged_s = time.monotonic()
            step(found)
            self._stepped_s = time.monotonic()
            self._result = found
        except BaseException as error:
            self._error = error

    def wait(self) -> Averaged:
        """Wait for the result; raise the thread's error."""
        self._due_s = time.monotonic()
        if self._result is None and self._error is None:
            assert self._thread is not None
            self._thread.join()
            self.exposed_s += time.monotonic() - self._due_s
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def end(self, abort: Callable[[], None], deadline_s: float) -> None:
        """Abort the thread if it runs, and wait a few seconds for its end."""
        if self._thread is not None and self._thread.is_alive():
            abort()
            self._thread.join(deadline_s)

    def times(self, trained_from_s: float, loading_s: float, loaded_s: float) -> ExchangeTimes:
        """Return the times of the exchange and of the loop around it."""
        own = self._sent_s, self._copied_s, self._begun_s, self._averaged_s, self._stepped_s
        number = self.given.number
        return ExchangeTimes(number, trained_from_s, *own, self._due_s, loading_s, loaded_s)


class ExchangeLog:
    """Times of recent exchanges, and total seconds.

    `took_s`: exchanges and outer steps; `exposed_s`: waiting time of the loop.
    """

    def __init__(self) -> None:
        self.latest: deque[ExchangeTimes] = deque(maxlen=_KEPT_TIMES)
        self.took_s = self.exposed_s = 0.0
        self._trained_from_s = time.monotonic()

    def add(self, exchange: RunningExchange, loading_s: float) -> None:
        """Add an exchange whose result was loaded from `loading_s` until now."""
        loaded_s = time.monotonic()
        self.took_s += exchange.took_s
        self.exposed_s += exchange.exposed_s
        if not exchange.given.is_closing:
            self.latest.append(exchange.times(self._trained_from_s, loading_s, loaded_s))
        self._trained_from_s = loaded_s
