"""The parts, and the tables of result.json, as the README shows them.

    python benchmarks/wheel/tables.py

puts them into README.md, between the lines that say so, and draws epochs.svg and turns.svg.
"""

import json
import sys
from functools import partial
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import epochs  # noqa: E402
import heads  # noqa: E402
import real  # noqa: E402
import rehearsed  # noqa: E402
import traffic  # noqa: E402
import turns  # noqa: E402

from readme import Part, fill, under_title  # noqa: E402

PARTS = {
    "bytes": Part("Bytes on the wire", traffic.measure, traffic.text),
    "rehearsed": Part("Figure 8, rehearsed", rehearsed.measure, rehearsed.text),
    "heads": Part("Heads on two hosts, rehearsed", heads.measure, heads.text),
    "real": Part("Real arithmetic", real.measure, real.text),
    "turns": Part("Figure 4, from a real run", turns.measure, turns.text),
    "epochs": Part("Figure 7, on the digits", epochs.measure, epochs.text),
}

of = partial(under_title, PARTS)


def _draw() -> None:
    measured = json.loads((HERE / "result.json").read_text())["figures"]
    for name, drawn in (("epochs", epochs.drawn), ("turns", turns.drawn)):
        if name in measured:
            (HERE / f"{name}.svg").write_text(drawn(measured[name]))


if __name__ == "__main__":
    fill(HERE, ("result.json",), of)
    _draw()
