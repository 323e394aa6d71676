"""Measure strategy wheel's traffic, and its speed-up on slow networks.

All parts except `epochs` need root, to create two network namespaces.
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
