"""What strategy subbatch sends and gains, and what 8-bit activations and errors do to learning.

    python benchmarks/subbatch/main.py [PART ...] [--quick]

Parts are rehearsed, sizes, network, timeline, accuracy and errors. Without one all are measured;
network and timeline need root, for two network namespaces. With --quick a few steps show that
everything works; the figures mean nothing, and are not written.
"""

import json
import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["OMP_NUM_THREADS"] = "1"


import errors  # noqa: E402
import learning  # noqa: E402
import rehearsed  # noqa: E402
import sizes  # noqa: E402
import timeline  # noqa: E402

import network  # noqa: E402
import parts  # noqa: E402
from readme import Part  # noqa: E402

PARTS = {
    "rehearsed": Part("Four GPUs on a board, rehearsed", rehearsed.measure, rehearsed.text),
    "sizes": Part("Sub-batch sizes on 96 GPUs, rehearsed", sizes.measure, sizes.text),
    "network": Part("Two hosts, 1 Gbit/s", network.measure, network.text),
    "timeline": Part("The way through the head", timeline.measure, timeline.text),
    "accuracy": Part("What is learned", learning.measure, learning.text),
    "errors": Part("Errors of the types on the digits", errors.measure, errors.text),
}


def _draw() -> None:
    measured = json.loads((HERE / "result.json").read_text())["figures"]
    if "timeline" in measured:
        (HERE / "timeline.svg").write_text(timeline.drawn(measured["timeline"]))


if __name__ == "__main__":
    parts.run_parts(HERE, PARTS)
    if "--fill" in sys.argv:
        _draw()
