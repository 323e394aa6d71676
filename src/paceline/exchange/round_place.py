"""A worker's place in its rounds: the steps since a round began, and the exchange that is next."""

from collections.abc import Mapping
from typing import Any

from paceline.core.rounds import Rounds


class RoundPlace:
    """Counts inner steps and exchanges of one worker.

    `num_exchanges`: sent so far, of all fragments. `weights`: of the inner steps since each
    fragment was sent.
    """

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self.num_exchanges = 0
        self.weights = [0.0] * rounds.fragments
        self._in_round = 0  # inner steps

    @property
    def fragment(self) -> int:
        """The fragment that is sent next."""
        return self.num_exchanges % self._rounds.fragments

    @property
    def ends_round(self) -> bool:
        """True if the next exchange is the last one of a round."""
        return self.fragment == self._rounds.fragments - 1

    def step(self, weight: float) -> None:
        """Count an inner step of this weight, of which a round has `sync_every`."""
        self._in_round = self._in_round % self._rounds.sync_every + 1
        self.weights = [one + weight for one in self.weights]

    def is_due(self) -> bool:
        """Return True if a fragment is to be sent after the step that was counted last."""
        return self._in_round == self._rounds.sent_after(self.fragment)

    def send(self) -> float:
        """Count an exchange; return the weight of its fragment, which begins anew."""
        weight, self.weights[self.fragment] = self.weights[self.fragment], 0.0
        self.num_exchanges += 1
        return weight

    def forget_weights(self) -> None:
        """Drop the weight of steps whose progress is lost."""
        self.weights = [0.0] * self._rounds.fragments

    def go_on_after(self, number: int) -> None:
        """Continue after an exchange in which this worker took a peer's state."""
        self.num_exchanges = number + 1
        begun = self._rounds.sent_after(number % self._rounds.fragments) + self._rounds.delay
        self._in_round = begun % self._rounds.sync_every if self.num_exchanges else 0

    def state_dict(self) -> dict[str, Any]:
        """Return the place, of all workers alike but for the weights."""
        in_round = self._in_round % self._rounds.sync_every
        return {"num_exchanges": self.num_exchanges, "in_round": in_round}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a place in a round that may have had more steps than this worker's."""
        self.num_exchanges = state["num_exchanges"]
        self._in_round = min(state["in_round"], self._rounds.sent_after(self.fragment) - 1)
        self.forget_weights()
