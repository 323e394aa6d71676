"""A sentence that answers a question about a run or a study, with the figures that it rests on."""

from dataclasses import dataclass
from typing import Literal

Topic = Literal["method", "workers", "limit", "change", "memory"]
"""What is answered: which exchange, how many workers, what limits, what to change, what fits."""


@dataclass(frozen=True)
class Insight:
    """One plain sentence, and the (name, value with its unit) pairs that it was computed from."""

    topic: Topic
    sentence: str
    figures: tuple[tuple[str, str], ...]
