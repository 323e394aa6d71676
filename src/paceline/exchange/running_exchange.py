"""Schedule, run and time the exchanges of local updates."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from paceline.core.rounds import Rounds
from paceline.exchange.outer import Averaged, Contribution
from paceline.links.call_thread import CallThread

_KEPT_TIMES = 256  # exchanges kept in the log
# saved state of a worker without a running exchange
NO_EXCHANGE: dict[str, Any] = {"due": None, "sent": [], "buffers": []}


class RoundPlace:
    """Counts a worker's inner steps in the current round, and its exchanges.

    In a round, each fragment is exchanged once. `weights`: for each fragment, the total weight of
    the inner steps since its last exchange.
    """

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self.num_exchanges = 0
        self.weights = [0.0] * rounds.fragments
        self._in_round = 0  # inner steps in this round

    @property
    def fragment(self) -> int:
        """Number of the next fragment to send."""
        return self.num_exchanges % self._rounds.fragments

    @property
    def ends_round(self) -> bool:
        """Whether the next exchange is the last one of a round."""
        return self.fragment == self._rounds.fragments - 1

    def step(self, weight: float) -> None:
        """Count an inner step; a round has `sync_every` steps."""
        self._in_round = self._in_round % self._rounds.sync_every + 1
        self.weights = [one + weight for one in self.weights]

    def is_due(self) -> bool:
        """Return whether a fragment is due after the last counted step."""
        return self._in_round == self._rounds.sent_after(self.fragment)

    def send(self) -> float:
        """Count an exchange; return and reset its fragment's weight."""
        weight, self.weights[self.fragment] = self.weights[self.fragment], 0.0
        self.num_exchanges += 1
        return weight

    def reset_weights(self) -> None:
        """Reset the weights of all fragments, because the progress of their steps is lost."""
        self.weights = [0.0] * self._rounds.fragments

    def resume_after(self, number: int) -> None:
        """Continue after exchange `number`, in which this worker has loaded a peer's state."""
        self.num_exchanges = number + 1
        begun = self._rounds.sent_after(number % self._rounds.fragments) + self._rounds.delay
        self._in_round = begun % self._rounds.sync_every if self.num_exchanges else 0

    def state_dict(self) -> dict[str, Any]:
        """Return the number of exchanges and the position in the round, but not the weights."""
        in_round = self._in_round % self._rounds.sync_every
        return {"num_exchanges": self.num_exchanges, "in_round": in_round}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved position; exchanges that are overdue follow the next step."""
        self.num_exchanges = state["num_exchanges"]
        self._in_round = min(state["in_round"], self._rounds.sent_after(self.fragment) - 1)
        self.reset_weights()


@dataclass
class ExchangeTimes:
    """Times of an exchange, in seconds of the host's monotonic clock.

    `trained_from_s`: the worker began to train after the previous exchange. `sent_s`, `copied_s`:
    start and end of the copy to host memory. `begun_s`, `averaged_s`: start and end of averaging.
    `stepped_s`: end of the outer step. `due_s`: the worker began to wait for the result.
    `loading_s`, `loaded_s`: start and end of loading the result.
    """

    number: int
    sent_s: float
    copied_s: float
    begun_s: float
    averaged_s: float
    stepped_s: float
    due_s: float
    trained_from_s: float = 0.0
    loading_s: float = 0.0
    loaded_s: float = 0.0


class RunningExchange:
    """An exchange of the contribution `given`; its result is loaded after inner step `due`.

    `sent`: the worker's parameters at the start of the exchange, if the changes that training makes
    after the start are added to the result; otherwise empty.
    """

    def __init__(
        self, given: Contribution, due: int, sent_s: float, sent: Sequence[Tensor] = ()
    ) -> None:
        self.given, self.due, self.sent = given, due, sent
        self.times = ExchangeTimes(given.number, sent_s, *[time.monotonic()] * 5)
        self._future: Future[Averaged] = Future()
        self.exposed_s = 0.0  # seconds that the training loop waited

    def state(self) -> dict[str, Any]:
        """Return the state of a finished exchange, as plain values and tensors."""
        return {"due": self.due, "sent": self.sent, "buffers": self.given.buffers}

    @classmethod
    def of_state(cls, state: Mapping[str, Any], number: int, fragment: int) -> Self:
        """Create a finished exchange from its state; `number`: number of the exchange."""
        given = Contribution(number, fragment, 0.0, torch.empty(0), state["buffers"], False)
        made = cls(given, state["due"], time.monotonic(), state["sent"])
        made._future.set_result(Averaged(given, None, (), (), all_closing=False))
        return made

    def start(
        self,
        thread: CallThread,
        average: Callable[[Contribution], Averaged],
        step: Callable[[Averaged], None],
    ) -> None:
        """Average the contributions and take the outer step, both in `thread`."""

        def run() -> Averaged:
            self.times.begun_s = time.monotonic()
            found = average(self.given)
            self.times.averaged_s = time.monotonic()
            step(found)
            self.times.stepped_s = time.monotonic()
            return found

        self._future = thread.submit(run)

    @property
    def is_done(self) -> bool:
        """Whether the exchange has ended, with a result or an error."""
        return self._future.done()

    def wait(self) -> Averaged:
        """Wait for the result; raise the error of a failed exchange."""
        due_s = self.times.due_s = time.monotonic()
        if not self.is_done:
            wait([self._future])
            self.exposed_s += time.monotonic() - due_s
        return self._future.result()


class ExchangeLog:
    """Times of the latest exchanges, and total times of exchanges and of the loop's waits."""

    def __init__(self) -> None:
        self.latest: deque[ExchangeTimes] = deque(maxlen=_KEPT_TIMES)
        self.took_s = self.exposed_s = 0.0
        self._trained_from_s = time.monotonic()

    def add(self, exchange: RunningExchange, loading_s: float) -> None:
        """Add an exchange; loading its result began at `loading_s` and ended now."""
        times = exchange.times
        times.trained_from_s, times.loading_s = self._trained_from_s, loading_s
        times.loaded_s = self._trained_from_s = time.monotonic()
        self.took_s += times.stepped_s - times.begun_s
        self.exposed_s += exchange.exposed_s
        if not exchange.given.is_closing:
            self.latest.append(times)
