"""A worker's position in a round: inner steps since its start, and the next exchange."""

from collections.abc import Mapping
from typing import Any

from paceline.core.rounds import Rounds


class RoundPlace:
    """Counts a worker's inner steps and exchanges.

    `num_exchanges`: exchanges of all fragments so far. `weights`: weight of the inner steps since
    each fragment's last exchange.
    """

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self.num_exchanges = 0
        self.weights = [0.0] * rounds.fragments
        self._in_round = 0  # inner steps

    @property
    def fragment(self) -> int:
        """The next fragment to send."""
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

    def forget_weights(self) -> None:
        """Reset the weight of steps whose progress is lost."""
        self.weights = [0.0] * self._rounds.fragments

    def go_on_after(self, number: int) -> None:
        """Continue after an exchange that loaded a peer's state."""
        self.num_exchanges = number + 1
        begun = self._rounds.sent_after(number % self._rounds.fragments) + self._rounds.delay
        self._in_round = begun % self._rounds.sync_every if self.num_exchanges else 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position, which is equal on all workers except the weights."""
        in_round = self._in_round % self._rounds.sync_every
        return {"num_exchanges": self.num_exchanges, "in_round": in_round}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a position, possibly of a round with more steps."""
        self.num_exchanges = state["num_exchanges"]
        self._in_round = min(state["in_round"], self._rounds.sent_after(self.fragment) - 1)
        self.forget_weights()
