"""Colours that stay apart for colour-blind readers, one for each kind in all figures.

After Okabe and Ito's palette, <https://jfly.uni-koeln.de/color/>. Pairs of kinds (there and back)
share a colour and differ by hatching.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.core.plan import Kind

TEXT = "#333333"
_VIOLET = "#8f6bc2"
TRAIN = {
    "line": {"color": _VIOLET, "dash": "dash"},
    "marker": {"symbol": "circle-open", "size": 7},
}
TEST = {"line": {"color": _VIOLET}, "marker": {"symbol": "circle", "size": 7}}


@dataclass(frozen=True)
class Fill:
    """How a bar is filled, what it stands for, and the colour of text on it."""

    label: str
    colour: str
    hatched: bool = False
    on_it: str = "#000000"

    def marker(self, border: Mapping[str, object]) -> dict[str, Any]:
        """Return plotly's settings for such a bar."""
        marker: dict[str, Any] = {"color": self.colour, "line": dict(border)}
        if self.hatched:
            marker["pattern"] = {
                "shape": "/",
                "fillmode": "overlay",
                "fgcolor": "#ffffff",
                "size": 6,
                "solidity": 0.35,
            }
        return marker

    @property
    def css(self) -> str:
        """The same as a CSS background."""
        if not self.hatched:
            return f"background:{self.colour}"
        stripes = f"{self.colour} 0 2px,#ffffff 2px 4px"
        return f"background:repeating-linear-gradient(135deg,{stripes})"


_YELLOW, _SKY, _BLUE, _GREEN = "#f0e442", "#56b4e9", "#0072b2", "#009e73"
_ORANGE, _VERMILLION, _PURPLE, _WINE = "#e69f00", "#d55e00", "#cc79a7", "#882255"

KINDS: dict[Kind, Fill] = {
    Kind.LOAD: Fill("load", _YELLOW),
    Kind.FORWARD: Fill("forward", _SKY),
    Kind.BACKWARD: Fill("backward", _BLUE, on_it="#ffffff"),
    Kind.ENCODE: Fill("encode", _PURPLE),
    Kind.D2H: Fill("device to host", _ORANGE),
    Kind.SEND: Fill("send", _WINE, on_it="#ffffff"),
    Kind.REDUCE: Fill("reduce", _VERMILLION),
    Kind.H2D: Fill("host to device", _ORANGE, hatched=True),
    Kind.DECODE: Fill("decode", _PURPLE, hatched=True),
    Kind.STEP: Fill("weight update", _GREEN),
}

# By the quantities of a comparison, in the order in which a step goes through them.
PARTS: dict[str, Fill] = {
    "load": KINDS[Kind.LOAD],
    "forward": KINDS[Kind.FORWARD],
    "backward": KINDS[Kind.BACKWARD],
    "hidden": Fill("hidden communication", _VERMILLION, hatched=True),
    "exposed": Fill("exposed communication", _VERMILLION),
    "update": KINDS[Kind.STEP],
    "idle": Fill("idle", "#b9bec5"),
}
