"""Measure the speed and accuracy of codecs against alternatives in the same run.

The environment variable OMP_NUM_THREADS sets the threads of our kernels and of bitsandbytes.
"""

from functools import partial

import accuracy
import between
import speed

import learning
from figures import Part

_PLACES = {
    "1gbit": "two hosts at 1 Gbit/s",
    "100mbit": "two hosts at 100 Mbit/s",
    "loopback": "two ranks on loopback",
}


PARTS = {
    "kernels": Part(speed.measure, speed.text, "Kernels on the CPU"),
    "training": Part(accuracy.part, learning.text, "Training"),
    **{
        rate: Part(
            partial(between.part, rate),
            partial(between.text, rate),
            f"AlexNet, 16 images a rank: {place}",
        )
        for rate, place in _PLACES.items()
    },
}
