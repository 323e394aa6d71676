"""What a terminal shows of a study: a table of its cells, and what they say."""

from collections.abc import Iterable, Sequence
from typing import Literal

from rich.table import Table

from paceline.report.format import duration
from paceline.scale_result import Cell, ScaleResult


def cells_table(cells: Sequence[Cell]) -> Table:
    """Return the cells, a line each, in 80 columns: what all share stands in the title."""
    kinds = list(dict.fromkeys(cell.kind for cell in cells))
    title = f"Seconds of an epoch, {' and '.join(kinds)}; memory in MiB"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    rows = [_row(cell) for cell in cells]
    needless = {"kind"} if len(kinds) == 1 else set()
    needless |= set() if any(row["quartiles"] for row in rows) else {"quartiles"}
    heads = [head for head in _row(cells[0]) if head not in needless]
    for head in heads:
        justify: Literal["left", "right"] = "left" if head in ("method", "kind") else "right"
        # Of a word a part can be missed, of a number not.
        table.add_column(head, justify=justify, no_wrap=head != "kind")
    for row in rows:
        table.add_row(*(row[head] for head in heads))
    return table


def _row(cell: Cell) -> dict[str, str]:
    memory = "" if cell.memory_bytes is None else f"{cell.memory_bytes / 2**20:,.0f}"
    computed = None
    if cell.forward_s is not None and cell.backward_s is not None:
        computed = cell.forward_s + cell.backward_s
    return {
        "method": cell.method,
        "workers": str(cell.workers),
        "batch": f"{cell.batch} each" if cell.scaling == "weak" else str(cell.batch),
        "kind": cell.kind,
        "epoch": "failed" if cell.error is not None else _seconds(cell.epoch_s),
        "quartiles": _quartiles(cell),
        "compute": _seconds(computed),
        "exposed": _seconds(cell.exposed_s),
        "memory": memory,
    }


def asked(cell: Cell) -> tuple[str, ...]:
    """Return what a cell is about."""
    return cell.method, str(cell.workers), str(cell.batch), cell.scaling, cell.kind


def _quartiles(cell: Cell) -> str:
    """Return the quartiles of the repetitions, where these differ."""
    if cell.spread is None or cell.spread[0] == cell.spread[1]:
        return ""
    return "-".join(map(_seconds, cell.spread))


def _seconds(value: float | None) -> str:
    """Return three digits, or all before the point."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:#.3g}"


def failures(cells: Iterable[Cell]) -> list[str]:
    """Return why cells failed: each reason once, with the first cell that it hit, and how many."""
    reasons: dict[str, list[Cell]] = {}
    for cell in cells:
        if cell.error is not None:
            reasons.setdefault(cell.error, []).append(cell)
    return [
        f"failed: {' '.join(asked(hit[0]))}: {reason}"
        + (f" (and {len(hit) - 1} more)" if len(hit) > 1 else "")
        for reason, hit in reasons.items()
    ]


def sentences(result: ScaleResult) -> list[str]:
    """Return what is to be said below the table."""
    return [*failures(result.cells), *(insight.sentence for insight in result.insights)]


def epoch_text(cells: Iterable[Cell]) -> str:
    """Return in a few words what a run has found."""
    first = next(iter(cells))
    return f"failed: {first.error}" if first.epoch_s is None else duration(first.epoch_s)
