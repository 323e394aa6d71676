"""Schedule, run and time the exchanges between workers that train by `LocalUpdates`."""

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

_KEPT_TIMES = 256  # number of exchanges whose times `ExchangeLog` keeps
# what `LocalUpdates.state_dict` saves if no exchange is running
NO_EXCHANGE: dict[str, Any] = {"due": None, "sent": [], "buffers": []}


class RoundPlace:
    """Counts inner (training) steps and exchanges, to find when the next exchange is due.

    A round has `sync_every` inner steps; in it, each fragment of the model is exchanged once.
    `weights`: for each fragment, the total weight of the inner steps since its last exchange.
    """

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self.num_exchanges = 0
        self.weights = [0.0] * rounds.fragments
        self._in_round = 0  # number of inner steps in this round

    @property
    def fragment(self) -> int:
        """Number of the fragment that is exchanged next."""
        return self.num_exchanges % self._rounds.fragments

    @property
    def ends_round(self) -> bool:
        """Whether the next exchange is the last one of a round."""
        return self.fragment == self._rounds.fragments - 1

    def step(self, weight: float) -> None:
        """Count an inner step, and add `weight` to all fragments' weights."""
        self._in_round = self._in_round % self._rounds.sync_every + 1
        self.weights = [one + weight for one in self.weights]

    def is_due(self) -> bool:
        """Return whether an exchange must start after the last counted step."""
        return self._in_round == self._rounds.sent_after(self.fragment)

    def send(self) -> float:
        """Count an exchange; return its fragment's weight, and reset that weight to 0."""
        weight, self.weights[self.fragment] = self.weights[self.fragment], 0.0
        self.num_exchanges += 1
        return weight

    def reset_weights(self) -> None:
        """Set all weights to 0, when this worker loses the changes of its last steps."""
        self.weights = [0.0] * self._rounds.fragments

    def resume_after(self, number: int) -> None:
        """Continue after exchange `number`, in which this worker loaded a peer's state."""
        self.num_exchanges = number + 1
        begun = self._rounds.sent_after(number % self._rounds.fragments) + self._rounds.delay
        self._in_round = begun % self._rounds.sync_every if self.num_exchanges else 0

    def state_dict(self) -> dict[str, Any]:
        """Return the number of exchanges and the position in the round, but not the weights."""
        in_round = self._in_round % self._rounds.sync_every
        return {"num_exchanges": self.num_exchanges, "in_round": in_round}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved position, and reset weights.

        If an exchange is already overdue at this position, it starts after the next step.
        """
        self.num_exchanges = state["num_exchanges"]
        self._in_round = min(state["in_round"], self._rounds.sent_after(self.fragment) - 1)
        self.reset_weights()


@dataclass
class ExchangeTimes:
    """Start and end times of the parts of an exchange, by the host's monotonic clock.

    `trained_from_s`: when training continued after the previous exchange. `sent_s`,
    `copied_s`: start and end of the copy of parameters to host memory. `begun_s`, `averaged_s`:
    start and end of averaging. `stepped_s`: end of the outer step. `due_s`: when the
    worker began to wait for the result. `loading_s`, `loaded_s`: start and end of loading it.
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
    """An exchange that runs while the worker trains; its result is loaded after step `due`.

    `given`: this worker's contribution. `sent_s`: time of the start. `sent`: the parameters at the
    start. Their changes since the start are added to the result, unless `sent` is empty.
    """

    def __init__(
        self, given: Contribution, due: int, sent_s: float, sent: Sequence[Tensor] = ()
    ) -> None:
        self.given, self.due, self.sent = given, due, sent
        self.times = ExchangeTimes(given.number, sent_s, *[time.monotonic()] * 5)
        self._future: Future[Averaged] = Future()
        self.exposed_s = 0.0  # seconds that the training loop waited

    def state(self) -> dict[str, Any]:
        """Return the state of a finished exchange that is not loaded yet: numbers and tensors."""
        return {"due": self.due, "sent": self.sent, "buffers": self.given.buffers}

    @classmethod
    def of_state(cls, state: Mapping[str, Any], number: int, fragment: int) -> Self:
        """Create a finished exchange from its `state`; `number`: number of the exchange."""
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
        """Start `average(given)`, and then `step(result)`, in `thread`."""

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
        """Wait for the exchange; return its result, or raise its error."""
        due_s = self.times.due_s = time.monotonic()
        if not self.is_done:
            wait([self._future])
            self.exposed_s += time.monotonic() - due_s
        return self._future.result()


class ExchangeLog:
    """Times of the latest exchanges, and totals over all exchanges.

    `took_s`: total of averaging and outer steps. `exposed_s`: total that the training loop waited.
    """

    def __init__(self) -> None:
        self.latest: deque[ExchangeTimes] = deque(maxlen=_KEPT_TIMES)
        self.took_s = self.exposed_s = 0.0
        self._trained_from_s = time.monotonic()

    def add(self, exchange: RunningExchange, loading_s: float) -> None:
        """Add an exchange whose result is loaded now; `loading_s`: when loading began."""
        times = exchange.times
        times.trained_from_s, times.loading_s = self._trained_from_s, loading_s
        times.loaded_s = self._trained_from_s = time.monotonic()
        self.took_s += times.stepped_s - times.begun_s
        self.exposed_s += exchange.exposed_s
        if not exchange.given.is_closing:
            self.latest.append(times)
