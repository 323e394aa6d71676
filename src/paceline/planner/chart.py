"""The crossover chart as text: samples a second against what the links can do, both logarithmic."""

from math import log10

from paceline.planner.sweep import Sweep, shown

_ROWS = 16
_STRIDE = 9  # characters between two values
_MARKS = "abcdefghijklmnopqrstuvwxyz"


def chart(found: Sweep) -> str:
    """Return the chart; where two ways are as fast, the better of them is shown."""
    series = found.series
    names = sorted(series, key=lambda name: -(series[name][-1] or 0.0))
    values = [value for line in series.values() for value in line if value is not None]
    low, high = log10(min(values)), log10(max(values))
    grid = [[" "] * (_STRIDE * (len(found.range.values) - 1) + 1) for _ in range(_ROWS)]
    for mark, name in reversed(list(zip(_MARKS, names, strict=False))):
        _draw(grid, series[name], mark, low, high)
    top, bottom = f"{10**high:.4g}", f"{10**low:.4g}"
    width = max(len(top), len(bottom))
    labels = [top, *[""] * (_ROWS - 2), bottom]
    lines = [f"{label:>{width}} |{''.join(row)}" for label, row in zip(labels, grid, strict=True)]
    ends = [shown(found.range, value) for value in (found.range.first, found.range.last)]
    gap = " " * max(1, len(grid[0]) - sum(map(len, ends)))
    lines.append(f"{'':>{width}}  {ends[0]}{gap}{ends[1]}")
    lines.append(f"{'':>{width}}  samples/s against {found.range.quantity}")
    lines += [f"{'':>{width}}  {mark} {name}" for mark, name in zip(_MARKS, names, strict=False)]
    return "\n".join(lines)


def _draw(
    grid: list[list[str]], line: tuple[float | None, ...], mark: str, low: float, high: float
) -> None:
    """Put the mark at each value, and dots between two that follow one another."""
    rows = [None if value is None else _row(value, low, high) for value in line]
    for number, row in enumerate(rows):
        after = rows[number + 1] if number + 1 < len(rows) else None
        if row is None:
            continue
        for i in range(1, _STRIDE if after is not None else 1):
            assert after is not None
            between = round(row + (after - row) * i / _STRIDE)
            if grid[between][number * _STRIDE + i] == " ":
                grid[between][number * _STRIDE + i] = "."
        grid[row][number * _STRIDE] = mark


def _row(value: float, low: float, high: float) -> int:
    return round((_ROWS - 1) * (high - log10(value)) / ((high - low) or 1.0))
