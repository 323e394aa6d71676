"""Draw time_to_loss.py's figures: the time of two hosts for each model and link rate."""

from collections.abc import Iterator, Mapping
from math import inf
from typing import Any

from steps_to_loss import CASES, FREE

import svg

_WIRES = {"1gbit": "1 Gbit/s", "100mbit": "100 Mbit/s"}
_LEFT, _TOP, _UNIT, _BAR, _GAP = 190, 70, 240, 14, 22
_MOST = 1.7  # times the lone host's time; longer bars are cut off
_SMALL = 'font-size="12" fill="#555"'
_DDP, _PLANNED = "DistributedDataParallel, the best", "what Paceline's plan chooses"
_COLOURS = {_DDP: "#e69f00", _PLANNED: "#0072b2", "an exchange that costs nothing": "#bbbbbb"}


def picture(figures: Mapping[str, Any]) -> str:
    """Return an SVG of all measured parts."""
    return "\n".join(_lines(figures)) + "\n"


def _lines(figures: Mapping[str, Any]) -> Iterator[str]:
    cases = [(case, wire) for case in CASES for wire in _WIRES if f"{case} {wire}" in figures]
    height = _TOP + len(cases) * (3 * _BAR + _GAP) + 30
    yield svg.opening(_LEFT + _MOST * _UNIT + 130, height)
    yield svg.text(8, 20, "Two hosts: time to a lone host's loss, as a share of the lone host's")
    for place, (name, colour) in enumerate(_COLOURS.items()):
        yield svg.box(8 + 225 * place, 34, 12, 12, colour)
        yield svg.text(25 + 225 * place, 45, name, _SMALL)
    for place, (case, wire) in enumerate(cases):
        top = _TOP + place * (3 * _BAR + _GAP)
        label = f"GPT, {case.upper()} parameters, {_WIRES[wire]}".replace("parameters, ", "")
        yield svg.text(8, top + 26, label)
        rows = _shares(figures[f"{case} {wire}"])
        for number, (colour, share) in enumerate(zip(_COLOURS.values(), rows, strict=True)):
            bar = top + number * _BAR
            yield svg.box(_LEFT, bar, min(share, _MOST) * _UNIT, _BAR - 2, colour)
            shown = "never" if share == inf else f"{share:.2f}"
            yield svg.text(_LEFT + min(share, _MOST) * _UNIT + 5, bar + 11, shown, _SMALL)
    alone = _LEFT + _UNIT
    yield svg.path([(alone, _TOP - 8), (alone, height - 30)], 'stroke="#222" stroke-dasharray="4"')
    yield svg.text(alone, height - 12, "the lone host", f'text-anchor="middle" {_SMALL}')
    yield "</svg>"


def _shares(figures: Mapping[str, Any]) -> tuple[float, float, float]:
    """Return times relative to the lone host's: the best DDP, the planned method, and free."""
    rows = figures["rows"]
    alone = rows["lone host"]["time_s"]
    ddp = min(own["time_s"] for name, own in rows.items() if name.startswith("DDP"))
    return ddp / alone, rows[figures["planned"]]["time_s"] / alone, rows[FREE]["time_s"] / alone
