"""How long a study will still take, from what its runs were expected to take and what they took."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import fsum


@dataclass(frozen=True)
class Expectation:
    """What a run of so many steps should take: a start, and seconds for each step."""

    start_s: float
    step_s: float
    steps: int

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.start_s + self.step_s * self.steps


class Remaining:
    """Seconds that are left of some runs.

    Expectations may be far off, but all in the same way: what is left is what was expected of the
    runs that are left, times the ratio that those which have ended show.
    """

    def __init__(self, expected_s: Iterable[float]) -> None:
        self._all_s = fsum(expected_s)
        self._expected_s: list[float] = []
        self._taken_s: list[float] = []

    def done(self, expected_s: float, taken_s: float) -> None:
        """Count a run that has ended."""
        self._expected_s.append(expected_s)
        self._taken_s.append(taken_s)

    @property
    def seconds(self) -> float | None:
        """What is left, exactly 0 in the end; None as long as nothing has ended or is known."""
        expected_s = fsum(self._expected_s)
        if not expected_s:
            return None
        return max(0.0, self._all_s - expected_s) * fsum(self._taken_s) / expected_s
