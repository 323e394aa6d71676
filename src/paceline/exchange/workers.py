"""The workers that take part in exchanges: a fixed group here, one that changes in `elastic`."""

from collections.abc import Mapping
from typing import Any, Protocol

from paceline.core.errors import InvalidInput
from paceline.exchange.averaging import Averaged, Averaging, Contribution
from paceline.links.group import Group

Settings = Mapping[str, Any]  # plain values by name, which all workers must have in common


class Workers(Protocol):
    """The workers with which this one exchanges, in the thread of the exchange.

    `rank` and `count`: this worker's place and the number of workers, in the last exchange.
    `num_final_exchanges`: exchanges after the first one in which all workers were closing.
    """

    @property
    def rank(self) -> int: ...  # noqa: D102
    @property
    def count(self) -> int: ...  # noqa: D102
    @property
    def num_final_exchanges(self) -> int: ...  # noqa: D102

    def exchange(self, given: Contribution) -> Averaged:
        """Average this worker's contribution with those of the others."""

    def abort(self) -> None:
        """End an exchange that another thread is in."""

    def close(self) -> None:
        """Let go of connections and hooks."""


class FixedWorkers:
    """The workers of a group, which ends with the first one that is lost."""

    def __init__(self, group: Group, averaging: Averaging, num_fragments: int) -> None:
        self._group, self._averaging = group, averaging
        self.rank, self.count = group.rank, group.world_size
        self.num_final_exchanges = num_fragments - 1

    def exchange(self, given: Contribution) -> Averaged:
        """Average this worker's contribution with those of the others."""
        return self._averaging.run(given, self._group)

    def abort(self) -> None:
        """End an exchange that another thread is in."""
        control: Any = self._group.control
        if control is not None:
            control.abort()

    def close(self) -> None:
        """Let go of the group's connections, which end with the last reference to them."""
        self._group = Group.alone(self._group.device, self._group.deadline_s)


def check_same_settings(own: Settings, other: Settings, here: str, there: str) -> None:
    """Raise InvalidInput with the first setting by which two workers differ."""
    for name, value in own.items():
        if other.get(name) != value:
            raise InvalidInput(
                name,
                f"{other.get(name)!r} on {there} and {value!r} on {here}",
                hint="give all workers the same",
            )
