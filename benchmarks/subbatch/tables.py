"""The parts, and the tables of result.json, as the README shows them.

    python benchmarks/subbatch/tables.py

puts them into README.md, between the lines that say so, and draws timeline.svg.
"""

import json
import sys
from functools import partial
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import errors  # noqa: E402
import learning  # noqa: E402
import rehearsed  # noqa: E402
import sizes  # noqa: E402
import timeline  # noqa: E402

import network  # noqa: E402
from readme import Part, fill, under_title  # noqa: E402

PARTS = {
    "rehearsed": Part("Four GPUs on a board, rehearsed", rehearsed.measure, rehearsed.text),
    "sizes": Part("Sub-batch sizes on 96 GPUs, rehearsed", sizes.measure, sizes.text),
    "network": Part("Two hosts, 1 Gbit/s", network.measure, network.text),
    "timeline": Part("The way through the head", timeline.measure, timeline.text),
    "accuracy": Part("What is learned", learning.measure, learning.text),
    "errors": Part("Errors of the types on the digits", errors.measure, errors.text),
}

of = partial(under_title, PARTS)


def _draw() -> None:
    measured = json.loads((HERE / "result.json").read_text())["figures"]
    if "timeline" in measured:
        (HERE / "timeline.svg").write_text(timeline.drawn(measured["timeline"]))


if __name__ == "__main__":
    fill(HERE, ("result.json",), of)
    _draw()
