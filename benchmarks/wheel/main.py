"""What strategy wheel sends, and what it gains where the network is slow.

    python benchmarks/wheel/main.py [bytes] [rehearsed] [heads] [real] [turns] [epochs] [--quick]

Without a part all are measured; all but epochs need root, for two network namespaces. With --quick
a few steps show that everything works; the figures mean nothing, and are not written.
"""

import json
import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "network")]
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["OMP_NUM_THREADS"] = "1"


import epochs  # noqa: E402
import heads  # noqa: E402
import real  # noqa: E402
import rehearsed  # noqa: E402
import traffic  # noqa: E402
import turns  # noqa: E402

import parts  # noqa: E402
from readme import Part  # noqa: E402

PARTS = {
    "bytes": Part("Bytes on the wire", traffic.measure, traffic.text),
    "rehearsed": Part("Figure 8, rehearsed", rehearsed.measure, rehearsed.text),
    "heads": Part("Heads on two hosts, rehearsed", heads.measure, heads.text),
    "real": Part("Real arithmetic", real.measure, real.text),
    "turns": Part("Figure 4, from a real run", turns.measure, turns.text),
    "epochs": Part("Figure 7, on the digits", epochs.measure, epochs.text),
}


def _draw() -> None:
    measured = json.loads((HERE / "result.json").read_text())["figures"]
    for name, drawn in (("epochs", epochs.drawn), ("turns", turns.drawn)):
        if name in measured:
            (HERE / f"{name}.svg").write_text(drawn(measured[name]))


if __name__ == "__main__":
    parts.run_parts(HERE, PARTS)
    if "--fill" in sys.argv:
        _draw()
