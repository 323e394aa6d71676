"""The parts, and the tables of result.json, as the README shows them.

    python benchmarks/wheel/tables.py

puts them into README.md, between the lines that say so, and draws epochs.svg.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import epochs  # noqa: E402
import real  # noqa: E402
import rehearsed  # noqa: E402
import traffic  # noqa: E402

from readme import fill  # noqa: E402


class Part(NamedTuple):
    """What a part is called, what measures it, quickly or not, and what makes tables of it."""

    title: str
    measure: Callable[[bool], dict[str, Any]]
    text: Callable[[dict[str, Any]], str]


PARTS = {
    "bytes": Part("Bytes on the wire", traffic.measure, traffic.text),
    "rehearsed": Part("Figure 8, rehearsed", rehearsed.measure, rehearsed.text),
    "real": Part("Real arithmetic", real.measure, real.text),
    "epochs": Part("Figure 7, on the digits", epochs.measure, epochs.text),
}


def of(part: str, figures: dict[str, Any]) -> str:
    """Return the tables of a part."""
    return f"## {PARTS[part].title}\n\n{PARTS[part].text(figures)}"


def _draw() -> None:
    measured = json.loads((HERE / "result.json").read_text())["figures"]
    if "epochs" in measured:
        (HERE / "epochs.svg").write_text(epochs.drawn(measured["epochs"]))


if __name__ == "__main__":
    fill(HERE, ("result.json",), of)
    _draw()
