"""The cost model of Le et al. 2018, section 3.2: closed forms of the backward phase.

Layers are given in the paper's order: layer 1, the first of the network and the last of backward,
stands first. Every worker is as fast as any other, so that one stands for all.

The forms are those of the plans under the paper's assumptions. For `host_s`: each layer is a chunk
of its own (else give each chunk as a layer); layers are copied, summed and sent back by different
processes, so that none waits for another's; and t_aa is a copy to the host and the sum there. For
`typical_s`: transfers take a time in proportion to their bytes. A simulation needs neither.
"""

from collections.abc import Sequence
from itertools import accumulate
from math import fsum
from typing import NamedTuple


class LayerPhases(NamedTuple):
    """Seconds that one layer takes, and the paper's symbols for them."""

    t_bp: float  # back-propagation (steps B-1 to B-4)
    t_as: float  # synchronising the device with its host (B-4-1)
    t_aa: float  # accumulating its gradients (B-4-2, or T-3 on GPU 0)
    t_bc: float  # bringing what results to all workers (B-4-3, or the parameters in T-5)


def backpropagation_s(layers: Sequence[LayerPhases]) -> float:
    """Return T_BP = sum of all t_bp: backward on one worker alone (definition 3.1)."""
    return fsum(layer.t_bp for layer in layers)


def processing_s(layers: Sequence[LayerPhases]) -> list[float]:
    """Return T_BP^i of each layer i: when all workers have its result (definition 3.2).

    T_BP^i = sum over k = l, ..., i of (t_bp^k + t_as^k) + t_aa^i + t_bc^i, counted from the start
    of backward. A later layer may be done before an earlier one.
    """
    computed = list(accumulate(layer.t_bp + layer.t_as for layer in reversed(layers)))
    return [
        done + layer.t_aa + layer.t_bc
        for layer, done in zip(layers, reversed(computed), strict=True)
    ]


def host_s(layers: Sequence[LayerPhases]) -> float:
    """Return T = max of all T_BP^i: backward with the host's exchange (definition 3.3)."""
    return max(processing_s(layers))


def host_overhead_s(layers: Sequence[LayerPhases]) -> float:
    """Return T_O = T - T_BP: what the host's exchange adds to backward."""
    return host_s(layers) - backpropagation_s(layers)


def typical_s(layers: Sequence[LayerPhases]) -> float:
    """Return T' = T_BP + sum of all (t_aa + t_bc), which strategy tree takes (def. 3.4)."""
    return backpropagation_s(layers) + fsum(layer.t_aa + layer.t_bc for layer in layers)
