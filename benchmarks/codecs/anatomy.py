"""Draw what the bits of each 8-bit type mean, and which magnitudes it has: anatomy.py IMAGE.svg."""

import math
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import svg
from paceline.codecs.quantization import TABLES, table

_WIDTH, _ROW, _TOP, _BOX = 1180, 96, 48, 30
_AXIS = (440, 1150)  # from 10^-8 to 1
_DECADES = 8
_COLOURS = {
    "sign": "#9aa5b1",
    "exponent": "#e8a33d",
    "marker": "#c65d3b",
    "fraction": "#3f7fbf",
}
# What the paper's bits are, one word each, with an example of each type.
_BITS = {
    "dynamic8": (
        ["sign", *["exponent"] * 2, "marker", *["fraction"] * 4],
        "00010110",
        "as many zeros as powers of 1/10; then bits bisect (0.1, 1)",
    ),
    "static8": (
        ["sign", *["exponent"] * 3, *["fraction"] * 4],
        "00100110",
        "three bits of exponent; four bits bisect (0.1, 1)",
    ),
    "mantissa8": (
        ["sign", *["exponent"] * 3, *["fraction"] * 4],
        "00100110",
        "three bits of exponent; a decimal mantissa from 0 to 15",
    ),
    "linear8": (["sign", *["fraction"] * 7], "00100110", "equal steps from 0 to 1"),
}


def drawn() -> Iterator[str]:
    """Yield the picture, line by line."""
    height = _TOP + _ROW * len(TABLES) + 40
    yield svg.opening(_WIDTH, height)
    yield from _legend()
    for row, name in enumerate(TABLES):
        top = _TOP + _ROW * row
        yield from _boxes(name, top)
        yield from _codes(name, top)
    yield from _scale(_TOP + _ROW * len(TABLES) + 6)
    yield "</svg>"


def _legend() -> Iterator[str]:
    left = 20
    for word, colour in _COLOURS.items():
        yield svg.box(left, 12, 14, 14, colour)
        yield svg.text(left + 20, 24, word)
        left += 96
    yield svg.text(
        _AXIS[0], 24, "the magnitudes that a value can become, over the scale of its block"
    )


def _boxes(name: str, top: float) -> Iterator[str]:
    words, example, meaning = _BITS[name]
    yield svg.text(20, top + 30, f'<tspan font-weight="bold">{name}</tspan>')
    for i, (word, bit) in enumerate(zip(words, example, strict=True)):
        left = 110 + i * (_BOX + 3)
        yield svg.box(left, top + 10, _BOX, _BOX, _COLOURS[word])
        yield svg.text(left + _BOX / 2, top + 30, bit, 'fill="white" text-anchor="middle"')
    yield svg.text(20, top + 62, meaning, 'font-size="12" fill="#555"')


def _codes(name: str, top: float) -> Iterator[str]:
    magnitudes = table(name).magnitudes.tolist()[1:]
    yield f'<line x1="{_AXIS[0]}" x2="{_AXIS[1]}" y1="{top + 40}" y2="{top + 40}" stroke="#ccc"/>'
    path = "".join(f"M{_place(value):.1f} {top + 10}v30" for value in magnitudes)
    yield f'<path d="{path}" stroke="{_COLOURS["fraction"]}" stroke-width="0.8"/>'
    smallest, largest = magnitudes[0], magnitudes[-1]
    said = f"zero, and {len(magnitudes)} from {smallest:.3g} to {largest:.3g}"
    yield svg.text(_AXIS[0], top + 62, said, 'font-size="12" fill="#555"')


def _scale(top: float) -> Iterator[str]:
    for power in range(-_DECADES, 1):
        said = "1" if power == 0 else f'10<tspan dy="-5" font-size="9">{power}</tspan>'
        yield svg.text(_place(10.0**power), top + 12, said, 'text-anchor="middle" font-size="12"')


def _place(value: float) -> float:
    return _AXIS[1] + (_AXIS[1] - _AXIS[0]) * math.log10(value) / _DECADES


if __name__ == "__main__":
    Path(sys.argv[1]).write_text("\n".join(drawn()) + "\n")
