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

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Parse an interval: 500 (steps), 60s, 5min or 1h; None for never.

        Raises ValueError for any other text, for a length of 0, and for over 1e9 s.
        """
        if text == NEVER:
            return None
        if _STEPS.fullmatch(text) and (steps := int(text)) > 0:
            return cls(steps=steps)
        if match := _TIME.fullmatch(text):
            seconds = float(match[1]) * _SECONDS_OF[match[2]]
            if 0 < seconds <= LONGEST_S:
                return cls(seconds=seconds)
        raise ValueError(f"must be steps (500), a time (60s, 5min, 1h) or never (got {text!r})")
