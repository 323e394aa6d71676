"""What strategy wheel sends, and what it gains where the network is slow.

All parts but epochs need root, for two network namespaces.
"""

import epochs
import heads
import real
import rehearsed
import traffic
import turns

from figures import Part, Picture

PARTS = {
    "bytes": Part(traffic.measure, traffic.text, "Bytes on the wire"),
    "rehearsed": Part(rehearsed.measure, rehearsed.text, "Figure 8, rehearsed"),
    "heads": Part(heads.measure, heads.text, "Heads on two hosts, rehearsed"),
    "real": Part(real.measure, real.text, "Real arithmetic"),
    "turns": Part(turns.measure, turns.text, "Figure 4, from a real run"),
    "epochs": Part(epochs.measure, epochs.text, "Figure 7, on the digits"),
}
PICTURES = {"benchmarks/wheel/turns.svg": Picture(turns.drawn, "turns")}
