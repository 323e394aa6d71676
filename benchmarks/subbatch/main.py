"""Measure bytes, speed-ups and 8-bit accuracy of strategy subbatch.

Part network requires root, for two network namespaces.
"""

import errors
import model_parallel
import rehearsed

import network
from figures import Part

PARTS = {
    "rehearsed": Part(rehearsed.part, rehearsed.text, "Four GPUs on a board, rehearsed"),
    "network": Part(network.part, network.text, "Two hosts, 1 Gbit/s"),
    "accuracy": Part(model_parallel.part, model_parallel.text, "What is learned"),
    "errors": Part(errors.measure, errors.text, "Errors of the types on the digits"),
}
