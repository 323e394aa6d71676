"""Measure bytes, speed-ups and 8-bit accuracy of strategy subbatch.

Part network requires root, for two network namespaces.
"""

from pathlib import Path
from typing import Any

import errors
import rehearsed
import sizes

import learning
import network
from figures import Part
from ranks import on_ranks

_PRINTED = "Section 3.4 prints F(4,4) = 0.54, p = 0.71 for model parallelism on MNIST."


def learnt(quick: bool) -> dict[str, Any]:
    """Return accuracies of two ranks with 8-bit activations and activation gradients."""
    found = on_ranks(Path(__file__).parent, "model_parallel", learning.NUM_RANKS, quick)
    return learning.tested(found)


def text_of_learnt(figures: dict[str, Any]) -> str:
    """Return the tables of accuracies."""
    return f"{learning.text(figures)}\n\n{_PRINTED}"


PARTS = {
    "rehearsed": Part(rehearsed.measure, rehearsed.text, "Four GPUs on a board, rehearsed"),
    "sizes": Part(sizes.measure, sizes.text, "Sub-batch sizes on 96 GPUs, rehearsed"),
    "network": Part(network.measure, network.text, "Two hosts, 1 Gbit/s"),
    "accuracy": Part(learnt, text_of_learnt, "What is learned"),
    "errors": Part(errors.measure, errors.text, "Errors of the types on the digits"),
}
