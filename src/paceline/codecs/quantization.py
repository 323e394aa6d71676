"""The four 8-bit types of Dettmers 2016, section 3.1, and what specifies all tables.

A type is a table of what seven bits of magnitude mean; the eighth bit is the sign (of the 4-bit
types in `four_bit.py`, three and the fourth). All four hold
zero: where a tree has 128 leaves, it takes the place of the smallest one. `encode` and `decode` are
written in plain torch operations; the C++ and Triton kernels equal them bit for bit.
"""

from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import torch
from torch import Tensor

from paceline.codecs.codec import finite
from paceline.core.errors import InvalidInput
from paceline.native import Codebook, FourBitTable

_NUM_MAGNITUDES = 128
_FEW_BITS = 4


def leaves(num_bits: int) -> list[float]:
    """Return the middles of the intervals that bits bisect (0.1, 1) into."""
    width = 0.9 / 2**num_bits
    return [0.1 + width * (i + 0.5) for i in range(2**num_bits)]


# Each type's magnitudes, in any order.
TABLES: dict[str, list[float]] = {
    # The dynamic tree: n zeros for 10^-n, a one, and 6 - n bits that bisect (0.1, 1).
    "dynamic8": [leaf / 10**n for n in range(7) for leaf in leaves(6 - n)],
    # The static tree: three bits of exponent, and four that bisect (0.1, 1).
    "static8": [leaf / 10**n for n in range(8) for leaf in leaves(4)],
    # A decimal mantissa from 0 to 15, and three bits of exponent.
    "mantissa8": [i / 10 ** (n + 1) for n in range(8) for i in range(16) if i <= 10 ** (n + 1)],
    # Linear quantisation: a tree over (0, 1) without an exponent.
    "linear8": [i / (_NUM_MAGNITUDES - 1) for i in range(_NUM_MAGNITUDES)],
}


@dataclass(frozen=True, eq=False)
class QuantizationTable:
    """Magnitudes in ascending order, from 0 to at most 1: float32, at most `most` of them.

    Code i means magnitudes[i], and code `most` + i the negative of it.
    """

    name: str
    magnitudes: Tensor
    most: int = _NUM_MAGNITUDES

    @cached_property
    def thresholds(self) -> Tensor:
        """float32 [len(magnitudes) - 1]: what is greater than number i is nearer to i + 1.

        Each is the largest float32 that is not above the midpoint of two magnitudes, so that no
        float32 is on the wrong side of it; a value in the very middle goes to the smaller one.
        """
        exact = self.magnitudes.double()
        middles = (exact[:-1] + exact[1:]) / 2
        rounded = middles.float()
        too_large = rounded.double() > middles
        return torch.where(too_large, rounded.nextafter(torch.zeros_like(rounded)), rounded)

    @property
    def num_bits(self) -> int:
        """The bits of a code: 8, or 4."""
        return (2 * self.most - 1).bit_length()

    @cached_property
    def lookup(self) -> Codebook | FourBitTable:
        """The lookup structure of the C++ kernels."""
        kind = FourBitTable if self.num_bits == _FEW_BITS else Codebook
        return kind(self.magnitudes.tolist(), self.thresholds.tolist())

    @cached_property
    def values(self) -> Tensor:
        """float32 [2 * most]: what each code means. Codes that are never written mean zero."""
        missing = self.most - len(self.magnitudes)
        half = torch.nn.functional.pad(self.magnitudes, (0, missing))
        return torch.cat([half, -half])


@cache
def table(name: str) -> QuantizationTable:
    """Return one of `TABLES`. InvalidInput if there is none of that name."""
    if name not in TABLES:
        raise InvalidInput(
            "table", f"{name!r} is not known", hint=f"choose one of {', '.join(TABLES)}"
        )
    return table_of(name, TABLES[name], _NUM_MAGNITUDES)


def table_of(name: str, magnitudes: list[float], most: int) -> QuantizationTable:
    """Return the table of zero and the magnitudes, in any order; of so many the largest."""
    rounded = np.array(magnitudes, dtype=np.float32)
    nonzero = np.unique(rounded[rounded > 0]).tolist()
    # Zero takes the place of the smallest magnitude where there is no place for all.
    kept = [0.0, *nonzero[-(most - 1) :]]
    # On the CPU, whatever default device its first user has: the table is kept.
    return QuantizationTable(name, torch.tensor(kept, device="cpu"), most)


def scales_of(values: Tensor, block_size: int) -> Tensor:
    """Return the largest finite magnitude of each block, float32 [ceil(count / block_size)]."""
    return in_blocks(finite(values).abs(), block_size).amax(1)


def encode(values: Tensor, scales: Tensor, block_size: int, table: QuantizationTable) -> Tensor:
    """Return the code nearest to each value over its block's scale: uint8 [count].

    The quotient is rounded to float32, and what exceeds the table has its largest magnitude. Values
    that are not finite, and those of a block whose scale is zero, are zero. Zeros lose their sign.
    """
    quotients = in_blocks(finite(values), block_size) / scales.unsqueeze(1)
    # A block of zeros has the scale 0, and 0 / 0 is NaN.
    known = torch.where(scales.unsqueeze(1) > 0, quotients, 0.0).flatten()[: len(values)]
    indices = torch.searchsorted(table.thresholds.to(values.device), known.abs())
    return (indices + table.most * ((known < 0) & (indices > 0))).to(torch.uint8)


def decode(codes: Tensor, scales: Tensor, block_size: int, table: QuantizationTable) -> Tensor:
    """Return the codes' values times their block's scale, float32 [count]."""
    values = table.values.to(codes.device)[codes.long()]
    return (in_blocks(values, block_size) * scales.unsqueeze(1)).flatten()[: len(codes)]


def in_blocks(values: Tensor, block_size: int) -> Tensor:
    """Return the values as [blocks, block_size], the last one filled up with zeros."""
    missing = -len(values) % block_size
    return torch.nn.functional.pad(values, (0, missing)).view(-1, block_size)


def join(codes: Tensor) -> Tensor:
    """Return codes, uint8 [count], as uint8 [ceil(count / 2)]: two a byte, the first one below.

    What an odd number leaves over is zero.
    """
    pairs = in_blocks(codes, 2)
    return pairs[:, 0] | pairs[:, 1] << _FEW_BITS


def split(joined: Tensor, count: int) -> Tensor:
    """Return the first `count` codes, uint8 [count], of bytes that have two each."""
    return torch.stack([joined & (1 << _FEW_BITS) - 1, joined >> _FEW_BITS], 1).flatten()[:count]
