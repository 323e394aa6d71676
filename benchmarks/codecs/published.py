"""Table 2 of Dettmers 2016, and what the published program seems to have measured for it.

Three things differ from what section 3.1 says:

* Trees: the first bit cuts (0.1, 1) at 0.45, which is the middle of (0.1, 0.8); only from the
  second bit on are intervals cut in halves. The paper's own examples are of such trees.
* Search: it compares a magnitude with every second of 128 entries only, as the search of the code
  that the paper refers to (github.com/TimDettmers/clusterNet) does, whose six steps are one too
  few. What is above an entry that is skipped, and not above the next one, becomes the former, be it
  the nearer one or not: in every second gap all values are rounded down.
* "Mean absolute error" is the mean of squares.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from paceline.codecs.quantization import table
from paceline.native import Codebook

EXACT, PUBLISHED = 0.55, 0.45  # where the first bit cuts (0.1, 1)


@dataclass(frozen=True)
class Distribution:
    """A row of the table: N(0, deviation^2), or U(0,1) if there is no deviation.

    `printed` has the mean "absolute" error and the mean relative error in percent of each type.
    """

    seed: int  # of the first piece
    deviation: float | None
    offset: float  # of the exponents of mantissa8 and static8
    printed: dict[str, tuple[float, float]]

    def piece(self, number: int, count: int) -> Tensor:
        """Return so many float32: one of at most 1000 pieces of a sample."""
        generator = torch.Generator().manual_seed(self.seed + number)
        if self.deviation is None:
            return torch.rand(count, generator=generator)
        return self.deviation * torch.randn(count, generator=generator)


_TYPES = ("dynamic8", "linear8", "mantissa8", "static8")  # in the order of the table


def _printed(*errors: tuple[float, float]) -> dict[str, tuple[float, float]]:
    return dict(zip(_TYPES, errors, strict=True))


TABLE_2 = {
    "U(0,1)": Distribution(
        seed=0,
        deviation=None,
        offset=10,
        printed=_printed((0.00004, 1.39), (0.0024, 2.16), (0.0017, 7.22), (0.0007, 4.82)),
    ),
    "N(0,1)": Distribution(
        seed=1000,
        deviation=1,
        offset=10,
        printed=_printed((0.0005, 2.46), (0.0004, 6.47), (0.0104, 6.89), (0.0093, 6.3)),
    ),
    "N(0,10^2)": Distribution(
        seed=2000,
        deviation=10,
        offset=100,
        printed=_printed((0.049, 2.49), (0.041, 6.44), (1.066, 7.19), (0.926, 6.28)),
    ),
    "N(0,0.2^2)": Distribution(
        seed=3000,
        deviation=0.2,
        offset=10,
        printed=_printed((0.000018, 2.45), (0.000015, 6.15), (0.00055, 8.26), (0.00022, 6.58)),
    ),
}

# Of section 3.1: a number, bits of the tree, power of 1/10, and what it is approximated as.
EXAMPLES = (
    (0.2345678, 6, 0, 0.236719),
    (0.2345678, 3, 0, 0.23125),
    (0.0000234, 2, 4, 0.000019),
)


def leaves(num_bits: int, first_cut: float) -> list[float]:
    """Return the middles of the intervals that bits cut (0.1, 1) into."""
    edges = [0.1, first_cut, 1.0]
    for _ in range(num_bits - 1):
        middles = [(low + high) / 2 for low, high in pairwise(edges)]
        edges = sorted([*edges, *middles])
    return [(low + high) / 2 for low, high in pairwise(edges)]


def nearest_leaf(value: float, num_bits: int, power: int, first_cut: float) -> float:
    """Return what a value is approximated as by a tree of so many bits."""
    found = (leaf / 10**power for leaf in leaves(num_bits, first_cut))
    return min(found, key=lambda leaf: abs(leaf - value))


def magnitudes(name: str) -> Tensor:
    """Return the published magnitudes of a type: float32, ascending, zero first."""
    if name == "dynamic8":
        tree = [leaf / 10**n for n in range(6) for leaf in leaves(6 - n, PUBLISHED)]
        return torch.tensor([0.0, *sorted(tree), 1.0])
    if name == "static8":
        tree = [leaf / 10**n for n in range(8) for leaf in leaves(4, PUBLISHED)]
        return torch.tensor([0.0, *sorted(tree)[1:]])
    return table(name).magnitudes


def codebook(name: str) -> Codebook:
    """Return the published magnitudes with the thresholds of the published search."""
    entries = magnitudes(name)
    thresholds = (entries[:-1] + entries[1:]) / 2
    compared = entries[2::2]
    thresholds[1::2] = compared[: len(thresholds[1::2])]
    return Codebook(entries.tolist(), thresholds.tolist())
