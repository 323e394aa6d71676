"""What all benchmarks share: parts, medians with their spread, and tables of them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median, quantiles
from typing import Any, NamedTuple


class Part(NamedTuple):
    """What measures a part, quickly or not, what makes tables of its figures, and their heading."""

    measure: Callable[[bool], Any]
    text: Callable[[Any], str]
    title: str = ""


class Picture(NamedTuple):
    """What draws the figures of a part, or those of all parts, as SVG."""

    draw: Callable[[Any], str]
    part: str | None = None


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median, the quartiles around it, and the number of values."""
    low, _, high = quantiles(values if len(values) > 1 else [*values, *values], n=4)
    return {"median": median(values), "quartile1": low, "quartile3": high, "repeats": len(values)}


def shown(figure: Mapping[str, float], scale: float = 1.0, digits: int = 3) -> str:
    """Return a figure as a table shows it: the median, and its quartiles in brackets."""
    middle, low, high = (scale * figure[key] for key in ("median", "quartile1", "quartile3"))
    return f"{middle:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def table(title: str, head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown, with a title above it if there is one."""
    rows = [head, ["---"] * len(head), *lines]
    drawn = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"**{title}**\n\n{drawn}" if title else drawn
