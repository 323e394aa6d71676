"""Rounds: who takes part in which exchange, and who trains on which units.

    exchange    0   1   2 | 3   4   5 |          fragment = exchange mod fragments
    round       0         | 1         |
    worker 0    .   .   . | .   .   . |
    worker 1    .   x       waits     | joins at the border of a round

An exchange is complete when all workers that are there have sent their parts. What a lost worker
has sent counts; what it had still to train on goes to others. No rpc and no tensors: `Hub` asks,
and does as it says.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from paceline.strategies.local.config import Local
from paceline.strategies.local.units import Units, inner_steps

Part = TypeVar("Part")


class OutOfTurn(Exception):
    """A worker takes no part at present, or is elsewhere: it begins again, as the group is."""


@dataclass
class Member:
    """A worker that takes part: its units by round, and the seconds of one of its inner steps."""

    units: dict[int, list[int]] = field(default_factory=dict)
    step_s: float | None = None

    @property
    def most_units(self) -> int:
        """The units of its longest round."""
        return max(map(len, self.units.values()), default=0)


class Dealt(NamedTuple):
    """A worker's units of a round, and the round's place: units before it, and all of its own."""

    units: Sequence[int]
    steps: tuple[int, int]


@dataclass(frozen=True)
class Completed(Generic[Part]):
    """An exchange for which all parts have come, by worker in the workers' order."""

    exchange: int
    parts: Mapping[int, Part]
    ends_round: bool


class Rounds(Generic[Part]):
    """The state of a run between its workers, from `first_exchange` on.

    With `is_balanced`, workers take inner steps in proportion to their speeds. `speeds`: the
    seconds of an inner step that are known of workers before.
    """

    def __init__(
        self,
        units: Units,
        config: Local,
        *,
        is_balanced: bool = False,
        first_exchange: int = 0,
        speeds: Mapping[int, float] | None = None,
    ) -> None:
        self.units, self._config, self._is_balanced = units, config, is_balanced
        self.exchange = first_exchange
        self.members: dict[int, Member] = {}
        self.posted: dict[int, Part] = {}
        self._reserved: dict[int, dict[int, list[int]]] = {}
        self.speeds: dict[int, float] = dict(speeds or {})
        self.places: dict[int, tuple[int, int]] = {}  # of rounds that were dealt

    @property
    def round(self) -> int:
        """The round of the exchange whose parts are being collected."""
        return self.exchange // self._config.fragments

    @property
    def is_at_border(self) -> bool:
        """True if no part of this round was sent: workers may join."""
        return self.exchange % self._config.fragments == 0 and not self.posted

    @property
    def is_over(self) -> bool:
        """True if all units are trained on, and all parts were exchanged."""
        return self.is_at_border and not self.units.num_left and not self._outstanding

    @property
    def _outstanding(self) -> bool:
        held = (one.units for one in self.members.values())
        return any(units for dealt in (*held, *self._reserved.values()) for units in dealt.values())

    @property
    def num_done(self) -> int:
        """The units that were trained on, by workers that have sent what they learnt."""
        dealt = [*(one.units for one in self.members.values()), *self._reserved.values()]
        held = sum(len(units) for own in dealt for units in own.values())
        return self.units.num_units - self.units.num_left - held

    @property
    def missing(self) -> set[int]:
        """The workers whose parts of the exchange have not come."""
        return self.members.keys() - self.posted.keys()

    def reserve(
        self,
        units: Mapping[int, dict[int, list[int]]],
        places: Mapping[int, tuple[int, int]],
    ) -> None:
        """Keep units for workers that had them before, by worker and round."""
        self._reserved, self.places = dict(units), dict(places)

    def release(self) -> None:
        """Give back what was kept for workers that are not there."""
        for dealt in self._reserved.values():
            for units in dealt.values():
                self.units.give_back(units)
        self._reserved = {}

    def admit(self, worker: int) -> None:
        """Let a worker take part from this round on. If nobody is left, the next round begins."""
        if not self.members and not self.posted:
            fragments = self._config.fragments
            self.exchange = -(-self.exchange // fragments) * fragments
        if not self.is_at_border:
            raise ValueError("workers join at the border of a round only")
        units = self._reserved.pop(worker, {})
        self.members[worker] = Member(units, self.speeds.get(worker))

    def drop(self, worker: int) -> None:
        """Count on a worker no longer. What it has not sent, others train on."""
        member = self.members.pop(worker, None)
        if member is None:
            return
        fragments = self._config.fragments
        num_sent = self.exchange % fragments + (worker in self.posted)
        for number, units in member.units.items():
            is_current = number == self.round
            sent = self._config.sent_after(num_sent - 1, len(units)) if num_sent else 0
            self.units.give_back(units[sent if is_current else 0 :])

    def units_of(self, worker: int, number: int) -> Dealt | None:
        """Return the units of a worker's round; None if nothing is left for anybody.

        The first that asks for a round has the units of all workers dealt.
        """
        member = self.members.get(worker)
        if member is None or number not in (self.round, self.round + 1):
            raise OutOfTurn
        if number not in member.units:
            others = [one for one in self.members.values() if number in one.units]
            asked = {worker: member} if others else dict(sorted(self.members.items()))
            if not others and not self.units.num_left:
                return None
            before = self.units.num_units - self.units.num_left
            for one, units in self.units.take(self._wanted(asked)).items():
                self.members[one].units[number] = units
            place = before, self.units.num_units - self.units.num_left - before
            self.places.setdefault(number, place)
        return Dealt(member.units[number], self.places[number])

    def _wanted(self, asked: Mapping[int, Member]) -> dict[int, int]:
        every = self._config.sync_every
        if not self._is_balanced:
            return dict.fromkeys(asked, every)
        everybody = sorted(self.members)
        counts = inner_steps(every, [self.members[one].step_s for one in everybody])
        return {one: count for one, count in zip(everybody, counts, strict=True) if one in asked}

    def check_turn(self, worker: int, exchange: int) -> None:
        """Raise OutOfTurn unless the worker may send its part of that exchange now."""
        if worker not in self.members or exchange != self.exchange or worker in self.posted:
            raise OutOfTurn

    def post(self, worker: int, exchange: int, part: Part) -> None:
        """Take a worker's part of an exchange. Raises OutOfTurn if it is not the one's turn."""
        self.check_turn(worker, exchange)
        self.posted[worker] = part

    def complete(self) -> Completed[Part] | None:
        """Return the exchange and go on to the next, if all parts are there; else None."""
        if not self.posted or self.missing:
            return None
        number, fragments = self.exchange, self._config.fragments
        ends_round = (number + 1) % fragments == 0
        found = Completed(number, dict(sorted(self.posted.items())), ends_round)
        if ends_round:
            for member in self.members.values():
                member.units.pop(self.round, None)
            self.places.pop(self.round, None)
        self.exchange, self.posted = number + 1, {}
        return found

    def note_speed(self, worker: int, step_s: float) -> None:
        """Record the seconds of an inner step of a worker."""
        self.speeds[worker] = step_s
        if worker in self.members:
            self.members[worker].step_s = step_s
