"""An interval in steps or seconds."""

import re
from dataclasses import dataclass
from typing import Self

LONGEST_S = 1e9  # larger values overflow clocks and timeouts
NEVER = "never"
_SECONDS_OF = {"s": 1.0, "min": 60.0, "h": 3600.0}
_STEPS = re.compile("[0-9]{1,18}")
_TIME = re.compile(rf"([0-9]{{1,18}}(?:\.[0-9]{{1,18}})?) ?({'|'.join(_SECONDS_OF)})")


@dataclass(frozen=True, slots=True)
class Interval:
    """An interval of `steps` or of `seconds`; exactly one is set, and above 0."""

    steps: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"must be at least 1 step (got {self.steps})")
        if self.seconds is not None and not 0 < self.seconds <= LONGEST_S:
            raise ValueError(f"must be above 0 s and at most {LONGEST_S:g} s (got {self.seconds})")

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Parse an interval: 500 (steps), 60s, 5min or 1h; None for never.

        Raises ValueError for any other text, and for a length of 0.
        """
        if text == NEVER:
            return None
        if _STEPS.fullmatch(text):
            return cls(steps=int(text))
        if match := _TIME.fullmatch(text):
            return cls(seconds=float(match[1]) * _SECONDS_OF[match[2]])
        raise ValueError(f"must be steps (500), a time (60s, 5min, 1h) or never (got {text!r})")
