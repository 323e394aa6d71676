"""Compare speed-ups of 96 GPUs by sub-batch size with table 7 of Dettmers 2016."""

from pathlib import Path
from typing import Any

from figures import shown, table
from papers.dettmers8bit_planned import planned
from papers.paper_tables import printed_values
from ranks import on_ranks

_RANKS, _BITS = 4, (32, 8)


def measure(quick: bool) -> dict[str, Any]:
    """Return the printed, planned and rehearsed speed-ups; four ranks rehearse."""
    figures = on_ranks(Path(__file__).parent, "sizes_rank", _RANKS, quick)
    cases = [_case(name) for name in figures["speedups"]]
    printed = printed_values("dettmers8bit", "table 7, planned")
    figures["printed"] = {_name(*case): printed["speedup", *case] for case in cases}
    figures["planned"] = {_name(*case): planned(*case).speedup for case in cases}
    return figures


def _name(size: int, bits: int) -> str:
    return f"{size}, {bits}-bit"


def _case(name: str) -> tuple[int, int]:
    size, bits = name.removesuffix("-bit").split(", ")
    return int(size), int(bits)


def text(figures: dict[str, Any]) -> str:
    """Return the table of speed-ups, and the sizes ordered by speed."""
    lines = []
    for name, ours in figures["speedups"].items():
        plan, printed = figures["planned"][name], figures["printed"][name]
        row = (f"{printed:g}", f"{plan:.1f}", shown(ours, digits=1))
        error = f"{plan / ours['median'] - 1:+.1%}"
        lines.append((name, *row, error, f"{figures['late'][name]:.1%}"))
    head = ("sub-batch", "printed", "planned", "rehearsed", "planned by rehearsed", "late")
    title = f"Speed-ups of 96 GPUs by sub-batch size, {figures['slower']:g} times slower"
    return "\n\n".join([table(title, head, lines), *(_orders(figures, bits) for bits in _BITS)])


def _orders(figures: dict[str, Any], bits: int) -> str:
    """Order the sizes from slowest to fastest by printed, planned and rehearsed speed-up."""
    medians = {name: one["median"] for name, one in figures["speedups"].items()}
    said = []
    for what, values in (
        ("printed", figures["printed"]),
        ("planned", figures["planned"]),
        ("rehearsed", medians),
    ):
        names = [name for name in values if _case(name)[1] == bits]
        sizes = [str(_case(name)[0]) for name in sorted(names, key=values.__getitem__)]
        said.append(f"{what} {' < '.join(sizes)}")
    return f"{bits}-bit, slowest first: {'; '.join(said)}."
