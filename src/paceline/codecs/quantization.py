"""Tables of the 8-bit and 4-bit types, and the reference encoder and decoder in torch.

One bit of a code is the sign; the other bits are an index into a table of magnitudes. Every table
contains zero. If a type defines a nonzero magnitude for every index, zero replaces the smallest
one. The C++ and Triton kernels return the same bits as `encode` and `decode`.
"""

from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.codecs.codec import finite
from paceline.native import Codebook, FourBitTable


def _leaves(num_bits: int) -> list[float]:
    """Return the midpoints of the 2^num_bits equal intervals of (0.1, 1)."""
    width = 0.9 / 2**num_bits
    return [0.1 + width * (i + 0.5) for i in range(2**num_bits)]


# The magnitudes of each 8-bit type, in any order.
TABLES: dict[str, list[float]] = {  # Dettmers 2016, section 3.1
    # Dynamic tree: n zero bits for the factor 10^-n, then a one bit, then 6 - n bits that select
    # one of the equal intervals of (0.1, 1).
    "dynamic8": [leaf / 10**n for n in range(7) for leaf in _leaves(6 - n)],
    # Static tree: three bits for the factor 10^-n, and four bits that select one of the intervals.
    "static8": [leaf / 10**n for n in range(8) for leaf in _leaves(4)],
    # Four bits of mantissa, from 0 to 15, and three bits for the factor 10^-n.
    "mantissa8": [i / 10 ** (n + 1) for n in range(8) for i in range(16) if i <= 10 ** (n + 1)],
    # Linear quantisation: 128 equally spaced magnitudes from 0 to 1, without an exponent.
    "linear8": [i / 127 for i in range(128)],
}
FOUR_BIT_TABLES: dict[str, list[float]] = {
    # Three bits of exponent and no mantissa (Douillard et al. 2025, arXiv 2501.18512).
    "e3m0": [2.0**-n for n in range(7)],
    # Dynamic tree as for dynamic8, but with 2 - n bits instead of 6 - n for the interval.
    "dynamic4": [leaf / 10**n for n in range(3) for leaf in _leaves(2 - n)],
}


@dataclass(frozen=True, eq=False)
class QuantizationTable:
    """The magnitudes that a type can encode: float32, ascending, from 0 to at most 1.

    `most`: the largest possible number of magnitudes, 128 for an 8-bit type and 8 for a 4-bit type.
    Code i stands for magnitudes[i], and code `most` + i for -magnitudes[i].
    """

    name: str
    magnitudes: Tensor
    most: int

    @cached_property
    def thresholds(self) -> Tensor:
        """The midpoints between neighbouring magnitudes, float32 [len(magnitudes) - 1].

        A value above threshold i is nearer to magnitude i + 1 than to magnitude i. A midpoint that
        is not a float32 is rounded down, so comparisons are exact. A value equal to a midpoint is
        encoded as the smaller magnitude.
        """
        exact = self.magnitudes.double()
        middles = (exact[:-1] + exact[1:]) / 2
        rounded = middles.float()
        too_large = rounded.double() > middles
        return torch.where(too_large, rounded.nextafter(torch.zeros_like(rounded)), rounded)

    @property
    def num_bits(self) -> int:
        """The number of bits in a code: 8 or 4."""
        return (2 * self.most - 1).bit_length()

    @cached_property
    def lookup(self) -> Codebook | FourBitTable:
        """A C++ object with this table, which encodes and decodes CPU tensors."""
        kind = FourBitTable if self.num_bits == 4 else Codebook
        return kind(self.magnitudes.tolist(), self.thresholds.tolist())

    @cached_property
    def values(self) -> Tensor:
        """The value of each code, float32 [2 * most]; zero for codes that are never written."""
        missing = self.most - len(self.magnitudes)
        half = torch.nn.functional.pad(self.magnitudes, (0, missing))
        return torch.cat([half, -half])


class EncodedBlocks(NamedTuple):
    """Encoded values: their codes, and the scale of each block of `block_size` values."""

    codes: Tensor
    scales: Tensor
    block_size: int
    table: QuantizationTable


@cache
def table(name: str) -> QuantizationTable:
    """Return the table of the type `name`, such as "dynamic8"; every table contains zero."""
    magnitudes, most = (TABLES[name], 128) if name in TABLES else (FOUR_BIT_TABLES[name], 8)
    rounded = np.array(magnitudes, dtype=np.float32)
    nonzero = np.unique(rounded[rounded > 0]).tolist()
    kept = [0.0, *nonzero[-(most - 1) :]]
    # Create it on the CPU: the cached table must not depend on the first caller's default device.
    return QuantizationTable(name, torch.tensor(kept, device="cpu"), most)


def scales_of(values: Tensor, block_size: int) -> Tensor:
    """Return the largest finite magnitude of each block, float32 [ceil(count / block_size)]."""
    return in_blocks(finite(values).abs(), block_size).amax(1)


def encode(values: Tensor, scales: Tensor, block_size: int, table: QuantizationTable) -> Tensor:
    """Divide each value by its block's scale, and return the nearest codes, uint8 [count].

    Quotients are rounded to float32, and clipped to the largest magnitude. Non-finite values, and
    all values of a block with scale 0, become zero. Zero always has the code 0.
    """
    quotients = in_blocks(finite(values), block_size) / scales.unsqueeze(1)
    # Avoid NaN from 0 / 0: a block of zeros has the scale 0.
    known = torch.where(scales.unsqueeze(1) > 0, quotients, 0.0).flatten()[: len(values)]
    indices = torch.searchsorted(table.thresholds.to(values.device), known.abs())
    return (indices + table.most * ((known < 0) & (indices > 0))).to(torch.uint8)


def decode(encoded: EncodedBlocks) -> Tensor:
    """Decode codes, one per byte, to float32 [count]: each code's value times its block's scale."""
    codes, scales, block_size, table = encoded
    values = table.values.to(codes.device)[codes.long()]
    return (in_blocks(values, block_size) * scales.unsqueeze(1)).flatten()[: len(codes)]


def in_blocks(values: Tensor, block_size: int) -> Tensor:
    """Reshape to [blocks, block_size]; the last block is padded with zeros."""
    missing = -len(values) % block_size
    return torch.nn.functional.pad(values, (0, missing)).view(-1, block_size)


def join(codes: Tensor) -> Tensor:
    """Pack pairs of 4-bit codes, uint8 [count], into bytes, uint8 [ceil(count / 2)].

    The first code of each pair is in the lower four bits. If `count` is odd, the upper four bits of
    the last byte are zero.
    """
    pairs = in_blocks(codes, 2)
    return pairs[:, 0] | pairs[:, 1] << 4


def split(joined: Tensor, count: int) -> Tensor:
    """Unpack `count` 4-bit codes, uint8 [count], from the bytes that `join` has returned."""
    return torch.stack([joined & 15, joined >> 4], 1).flatten()[:count]
