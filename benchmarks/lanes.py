"""Draw part of a timeline as SVG: a row per lane, a box per span."""

from collections.abc import Iterator, Sequence

import svg
from paceline.core.plan import Kind
from paceline.core.timeline import Span
from paceline.report.figures import KINDS

_LEFT, _WIDTH, _ROW, _RIGHT = 190, 900, 26, 10

Row = tuple[str, Sequence[Span]]  # label and spans of a lane


def picture(title: str, rows: Sequence[Row], start_s: float, end_s: float) -> str:
    """Return an SVG of the lanes from `start_s` to `end_s`, with title and legend."""
    return "\n".join(_lines(title, rows, start_s, end_s)) + "\n"


def _lines(title: str, rows: Sequence[Row], start_s: float, end_s: float) -> Iterator[str]:
    yield svg.opening(_WIDTH, _ROW * (len(rows) + 2) + 20)
    yield svg.text(8, 18, title)
    used: set[Kind] = set()
    scale = (_WIDTH - _LEFT - _RIGHT) / (end_s - start_s)
    for row, (lane, spans) in enumerate(rows):
        top = 30 + _ROW * row
        yield svg.text(8, top + 15, lane, 'font-size="12" fill="#222"')
        yield svg.box(_LEFT, top, _WIDTH - _LEFT - _RIGHT, _ROW - 6, "#f3f5f7")
        for span in spans:
            left, right = max(span.start_s, start_s), min(span.end_s, end_s)
            if right > left:
                used.add(span.kind)
                place = _LEFT + (left - start_s) * scale
                width = max((right - left) * scale, 0.6)
                yield svg.box(place, top, width, _ROW - 6, *_look(span.kind))
    yield from _legend(used, 30 + _ROW * len(rows))
    yield "</svg>"


def _look(kind: Kind) -> tuple[str, float]:
    """Return the report's colour for a kind, and opacity 0.5 if the report hatches it."""
    return KINDS[kind].colour, 0.5 if KINDS[kind].hatched else 1.0


def _legend(used: set[Kind], top: float) -> Iterator[str]:
    left = float(_LEFT) if len(used) < 8 else 8.0
    for kind in Kind:
        if kind in used:
            fill = KINDS[kind]
            yield svg.box(left, top + 4, 12, 12, *_look(kind))
            yield svg.text(left + 16, top + 15, fill.label, 'font-size="12" fill="#222"')
            left += 34 + 7.2 * len(fill.label)
