"""Measure the speed and accuracy of codecs against alternatives in the same run.

The environment variable OMP_NUM_THREADS sets the threads of our kernels and of bitsandbytes.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pays
import speed
import two_hosts

import learning
from figures import Part, Picture
from ranks import on_ranks

_PLACES = {
    "1gbit": "two hosts at 1 Gbit/s",
    "100mbit": "two hosts at 100 Mbit/s",
    "loopback": "two ranks on loopback",
}


def trained(quick: bool) -> dict[str, Any]:
    """Return the test accuracy of two ranks with each codec, and F-tests."""
    found = on_ranks(Path(__file__).parent, "accuracy", learning.NUM_RANKS, quick)
    return learning.tested(found)


PARTS = {
    "kernels": Part(speed.measure, speed.text, "Kernels on the CPU"),
    "training": Part(trained, learning.text, "Training"),
    **{
        rate: Part(
            partial(two_hosts.measure, rate),
            partial(two_hosts.text, rate),
            f"AlexNet, 16 images a rank: {place}",
        )
        for rate, place in _PLACES.items()
    },
}
PICTURES = {"docs/images/codecs-pay.svg": Picture(pays.drawn)}
