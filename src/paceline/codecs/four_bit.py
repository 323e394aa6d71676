"""Two 4-bit types, two values a byte: their specification and their codec.

Three bits choose one of eight magnitudes, of which the first is zero; the fourth is the sign.
`quantization.encode` and `quantization.decode` specify what a value becomes, `join` and `split` how
codes share bytes. The C++ and Triton kernels, of which `FourBit` chooses one by a tensor's device,
equal them bit for bit.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from paceline.codecs.blockwise import has_triton
from paceline.codecs.codec import Codec, Payload, as_type, flat, num_nonfinite
from paceline.codecs.quantization import QuantizationTable, in_blocks, leaves, scales_of, table_of
from paceline.codecs.quantization import decode as decode_codes
from paceline.codecs.quantization import encode as encode_codes
from paceline.core.errors import InvalidInput
from paceline.native import FourBitTable

_NUM_MAGNITUDES = 8
_BITS = 4

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


@cache
def _native_table(name: str) -> FourBitTable:
    one = four_bit_table(name)
    return FourBitTable(one.magnitudes.tolist(), one.thresholds.tolist())


def join(codes: Tensor) -> Tensor:
    """Return codes, uint8 [count], as uint8 [ceil(count / 2)]: two a byte, the first one below.

    What an odd number leaves over is zero.
    """
    pairs = in_blocks(codes, 2)
    return pairs[:, 0] | pairs[:, 1] << _BITS


def split(joined: Tensor, count: int) -> Tensor:
    """Return the first `count` codes, uint8 [count], of bytes that have two each."""
    return torch.stack([joined & (1 << _BITS) - 1, joined >> _BITS], 1).flatten()[:count]


@dataclass(frozen=True)
class FourBit(Codec):
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
        block_size = self._block_size(len(values))
        if values.is_cpu:
            scales = torch.empty(-(-len(values) // block_size))
            codes = torch.empty(-(-len(values) // 2), dtype=torch.uint8)
            num_threads, native = torch.get_num_threads(), _native_table(self.type)
            num_lost = native.encode_into(codes, scales, values, block_size, True, num_threads)
        elif has_triton(values):
            from paceline.codecs import triton_four_bit

            codes, scales, num_found = triton_four_bit.encode(
                values, block_size, four_bit_table(self.type)
            )
            num_lost = int(num_found)
        else:
            scales = scales_of(values, block_size)
            chosen = four_bit_table(self.type)
            codes = join(encode_codes(values, scales, block_size, chosen))
            num_lost = num_nonfinite(values)
        return Payload(self.name, len(values), (scales.view(torch.uint8), codes), num_lost)

    def decode(self, payload: Payload, out: Tensor | None = None) -> Tensor:
        """Return the values, float32 [count], in `out` if it is given."""
        self._check(payload)
        values = payload.target(out)
        self._decode(payload, values, adds=False)
        return values

    def add_to(self, total: Tensor, payload: Payload) -> None:
        """Add the values to `total`, float32 [count]."""
        self._check(payload)
        payload.check_target(total)
        self._decode(payload, total, adds=True)

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
        block_size, codes = self._block_size(len(values)), payload.buffers[1]
        scales = as_type(payload.buffers[0], torch.float32)
        # Kernels index flat memory; a part of a row or of a larger tensor may have gaps.
        fits = values.is_contiguous() and codes.is_contiguous()
        if fits and values.is_cpu:
            num_threads, native = torch.get_num_threads(), _native_table(self.type)
            native.decode_into(values, codes, scales, block_size, adds, num_threads)
        elif fits and has_triton(values):
            from paceline.codecs import triton_four_bit

            chosen = four_bit_table(self.type)
            triton_four_bit.decode(values, codes, scales, block_size, chosen, adds)
        else:
            chosen = four_bit_table(self.type)
            found = decode_codes(split(codes, len(values)), scales, block_size, chosen)
            values.copy_(values + found if adds else found)
