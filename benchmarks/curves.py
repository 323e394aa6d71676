"""A picture of curves: one quantity over another, with axes, dots for what was found, a legend."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

import svg

_LEFT, _TOP, _WIDTH, _HEIGHT = 70, 46, 620, 260
_LEGEND, _ROW, _BELOW = 270, 20, 60
_TICKS = 5
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")

Point = tuple[float, float]


@dataclass(frozen=True)
class Curve:
    """A named line through points, or dots without a line."""

    name: str
    points: Sequence[Point]
    colour: str
    is_dots: bool = False
    dashes: str = ""


@dataclass(frozen=True)
class Axes:
    """What stands beside the axes, and the quantities at their ends."""

    across: str
    up: str
    lowest: Point
    highest: Point

    def place(self, point: Point) -> Point:
        """Return where a point of the curves lies in the picture."""
        (left, low), (right, high) = self.lowest, self.highest
        across, up = (point[0] - left) / (right - left), (point[1] - low) / (high - low)
        return _LEFT + _WIDTH * across, _TOP + _HEIGHT * (1 - up)


def picture(title: str, across: str, up: str, curves: Sequence[Curve], *, from_zero: bool) -> str:
    """Return the picture; the axis upwards begins at zero or below the lowest point."""
    xs, ys = zip(*(point for curve in curves for point in curve.points), strict=True)
    margin = 0.05 * (max(ys) - min(ys))
    low = 0.0 if from_zero else min(ys) - margin
    axes = Axes(across, up, (min(xs), low), (max(xs), max(ys) + margin))
    return "\n".join(_lines(title, axes, curves)) + "\n"


def _lines(title: str, axes: Axes, curves: Sequence[Curve]) -> Iterator[str]:
    yield svg.opening(_LEFT + _WIDTH + _LEGEND, _TOP + _HEIGHT + _BELOW)
    yield svg.text(8, 20, title)
    yield svg.text(8, 38, axes.up, 'font-size="12" fill="#555"')
    yield from _grid(axes)
    for number, curve in enumerate(curves):
        places = [axes.place(point) for point in curve.points]
        if curve.is_dots:
            yield from (_dot(place, curve.colour) for place in places)
        else:
            style = f'stroke="{curve.colour}" stroke-width="2"{curve.dashes}'
            yield svg.path(places, style)
        top = _TOP + _ROW * number
        yield svg.box(_LEFT + _WIDTH + 16, top, 12, 12, curve.colour)
        yield svg.text(_LEFT + _WIDTH + 34, top + 11, curve.name, 'font-size="12" fill="#222"')
    yield "</svg>"


def _grid(axes: Axes) -> Iterator[str]:
    small = 'font-size="12" fill="#555"'
    (left, low), (right, high) = axes.lowest, axes.highest
    for value in _ticks(low, high):
        _, height = axes.place((left, value))
        yield svg.path([(_LEFT, height), (_LEFT + _WIDTH, height)], 'stroke="#ddd"')
        yield svg.text(_LEFT - 8, height + 4, f"{value:,g}", f'text-anchor="end" {small}')
    for value in _ticks(left, right):
        across, _ = axes.place((value, low))
        yield svg.path([(across, _TOP + _HEIGHT), (across, _TOP + _HEIGHT + 5)], 'stroke="#888"')
        label = f"{value:,g}"
        yield svg.text(across, _TOP + _HEIGHT + 20, label, f'text-anchor="middle" {small}')
    yield svg.text(_LEFT, _TOP + _HEIGHT + 42, axes.across, small)


def _ticks(low: float, high: float) -> list[float]:
    """Return round numbers between two."""
    rough = (high - low) / _TICKS
    unit = 10.0 ** floor(log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    return [step * i for i in range(ceil(low / step), floor(high / step) + 1)]


def _dot(place: Point, colour: str) -> str:
    x, y = place
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}" stroke="white"/>'
