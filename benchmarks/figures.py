"""Define the parts of benchmarks, and format medians with quartiles in Markdown tables."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median, quantiles
from typing import Any, NamedTuple


class Part(NamedTuple):
    """A part of a benchmark: `measure(quick)`, `text(figures)` for its tables, and a heading."""

    measure: Callable[[bool], Any]
    text: Callable[[Any], str]
    title: str = ""


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median, the quartiles, and the number of values."""
    low, _, high = quantiles(values if len(values) > 1 else [*values, *values], n=4)
    return {"median": median(values), "quartile1": low, "quartile3": high, "repeats": len(values)}


def shown(figure: Mapping[str, float], scale: float = 1.0, digits: int = 3) -> str:
    """Format a figure for a table: the scaled median, and the quartiles in brackets."""
    middle, low, high = (scale * figure[key] for key in ("median", "quartile1", "quartile3"))
    return f"{middle:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def table(title: str, head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table, with `title` above it unless it is empty."""
    rows = [head, ["---"] * len(head), *lines]
    drawn = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"**{title}**\n\n{drawn}" if title else drawn
