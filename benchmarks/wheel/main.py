"""Measure strategy wheel's traffic, and its speed-up on slow networks.

All parts need root, to create two network namespaces.
"""

import heads
import real
import rehearsed
import traffic

from figures import Part

PARTS = {
    "bytes": Part(traffic.measure, traffic.text, "Bytes on the wire"),
    "rehearsed": Part(rehearsed.measure, rehearsed.text, "Figure 8, rehearsed"),
    "heads": Part(heads.measure, heads.text, "Heads on two hosts, rehearsed"),
    "real": Part(real.measure, real.text, "Real arithmetic"),
}
