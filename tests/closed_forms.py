"""The cost model of Le et al. 2018, section 3.2: closed forms of the backward phase.

Layers are in the paper's order: layer 1 is the first layer of the network and the last one of
backward. All workers are equally fast.

Plans match these forms under the paper's assumptions. For `host_s`: each layer is one chunk; layers
are copied, summed and sent back in parallel, so that no layer waits for another one; t_aa is the
copy to the host and the sum. For `typical_s`: the time of a transfer is proportional to its bytes.
"""

from collections.abc import Sequence
from itertools import accumulate
from math import fsum
from typing import NamedTuple


class LayerPhases(NamedTuple):
    """Seconds of the phases of a layer, by the paper's symbols."""

    t_bp: float  # back-propagation (steps B-1 to B-4)
    t_as: float  # synchronising the device with its host (B-4-1)
    t_aa: float  # accumulating its gradients (B-4-2, or T-3 on GPU 0)
    t_bc: float  # broadcasting the result to all workers (B-4-3, or parameters in T-5)


def backpropagation_s(layers: Sequence[LayerPhases]) -> float:
    """Return T_BP = sum of all t_bp: backward on one worker alone (definition 3.1)."""
    return fsum(layer.t_bp for layer in layers)


def processing_s(layers: Sequence[LayerPhases]) -> list[float]:
    """Return T_BP^i of each layer i: the time when all workers have its result (def. 3.2).

    T_BP^i = sum over k = l, ..., i of (t_bp^k + t_as^k) + t_aa^i + t_bc^i, counted from the start
    of backward. A later layer can be complete before an earlier one.
    """
    computed = list(accumulate(layer.t_bp + layer.t_as for layer in reversed(layers)))
    return [
        done + layer.t_aa + layer.t_bc
        for layer, done in zip(layers, reversed(computed), strict=True)
    ]


def host_s(layers: Sequence[LayerPhases]) -> float:
    """Return T, the maximum of T_BP^i: backward with the host's exchange (definition 3.3)."""
    return max(processing_s(layers))


def typical_s(layers: Sequence[LayerPhases]) -> float:
    """Return T' = T_BP + sum of all (t_aa + t_bc), the time of strategy tree (def. 3.4)."""
    return backpropagation_s(layers) + fsum(layer.t_aa + layer.t_bc for layer in layers)
