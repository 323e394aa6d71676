"""Two 4-bit types, two values a byte: their specification and their codec.

Three bits choose one of eight magnitudes, of which the first is zero; the fourth is the sign.
`quantization.encode` and `quantization.decode` specify what a value becomes, `join` and `split` how
codes share bytes.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from paceline.codecs import kernels
from paceline.codecs.blockwise import BlockCodec
from paceline.codecs.codec import Payload, as_type, flat
from paceline.codecs.quantization import QuantizationTable, leaves, table_of
from paceline.core.errors import InvalidInput

_NUM_MAGNITUDES = 8

# Each type's magnitudes, in any order.
FOUR_BIT_TABLES: dict[str, list[float]] = {
    # Three bits of exponent and none of mantissa (Douillard et al. 2025, arXiv 2501.18512): zero
    # takes the place of the smallest of eight powers of 2.
    "e3m0": [2.0**-n for n in range(_NUM_MAGNITUDES - 1)],
    # The dynamic tree of Dettmers 2016: n zeros for 10^-n, a one, and 2 - n bits that bisect
    # (0.1, 1).
    "dynamic4": [leaf / 10**n for n in range(3) for leaf in leaves(2 - n)],
}


@cache
def four_bit_table(name: str) -> QuantizationTable:
    """Return one of `FOUR_BIT_TABLES`. InvalidInput if there is none of that name."""
    if name not in FOUR_BIT_TABLES:
        known = ", ".join(FOUR_BIT_TABLES)
        raise InvalidInput("table", f"{name!r} is not known", hint=f"choose one of {known}")
    return table_of(name, FOUR_BIT_TABLES[name], _NUM_MAGNITUDES)


@dataclass(frozen=True)
class FourBit(BlockCodec):
    """Four bits a value by one of `FOUR_BIT_TABLES`, scaled block by block.

    A block's scale is its largest magnitude, which is sent with it: 4 bytes for `block_size`
    values, an even number. An all-reduce encodes what each rank has, and never a sum of it.
    """

    type: str
    block_size: int = 1024

    def __post_init__(self) -> None:
        four_bit_table(self.type)
        if self.block_size < 2 or self.block_size % 2:
            raise InvalidInput(
                "block_size", "must be even, because two values share a byte", got=self.block_size
            )

    @property
    def name(self) -> str:
        """The type, and what a receiver must have in common with the sender."""
        return f"{self.type}/{self.block_size}"

    @property
    def encodes_sums(self) -> bool:
        """False: rounding to four bits a second time would lose as much again."""
        return False

    def encode(self, values: Tensor) -> Payload:
        """Return the values, float32, encoded; what is not finite is zero, and counted."""
        values = flat(values)
        block_size, chosen = self._block_size(len(values)), four_bit_table(self.type)
        codes, scales, num_lost = kernels.encode(values, None, block_size, chosen)
        return Payload(self.name, len(values), (scales.view(torch.uint8), codes), num_lost)

    def nbytes(self, count: int) -> int:
        """Return the bytes of `count` values."""
        return sum(self._sizes(count))

    def _sizes(self, count: int) -> tuple[int, int]:
        """Return the bytes of both buffers: a scale a block, and the codes."""
        return 4 * -(-count // self.block_size), -(-count // 2)

    def _check(self, payload: Payload) -> None:
        payload.check(self.name, self._sizes(payload.count))

    def _block_size(self, count: int) -> int:
        """Return the block size for so many values: short tensors are not padded to a block."""
        return min(self.block_size, max(2, count + count % 2))

    def _decode(self, payload: Payload, values: Tensor, adds: bool) -> None:
        scales, block_size = (
            as_type(payload.buffers[0], torch.float32),
            self._block_size(len(values)),
        )
        codes, chosen = payload.buffers[1], four_bit_table(self.type)
        kernels.decode(values, codes, scales, block_size, chosen, adds)
