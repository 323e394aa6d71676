"""The four 8-bit types of Dettmers 2016, section 3.1, their codec, and what specifies all tables.

A type is a table of what seven bits of magnitude mean; the eighth bit is the sign (of the 4-bit
types in `four_bit.py`, three and the fourth). All four hold
zero: where a tree has 128 leaves, it takes the place of the smallest one. `encode` and `decode` are
written in plain torch operations; the C++ and Triton kernels, of which `EightBit` chooses one by a
tensor's device, equal them bit for bit.
"""

import os
import shutil
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from paceline.codecs.codec import Codec, Payload, as_type, finite, flat, num_nonfinite
from paceline.core.errors import InvalidInput
from paceline.links.devices import device_of
from paceline.native import Codebook, decode_into, encode_into

_NUM_MAGNITUDES = 128


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

    @cached_property
    def codebook(self) -> Codebook:
        """The lookup structure of the C++ kernels."""
        return Codebook(self.magnitudes.tolist(), self.thresholds.tolist())

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
    magnitudes = _quotients(values, scales, block_size)
    indices = torch.searchsorted(table.thresholds.to(values.device), magnitudes)
    return _signed(indices, values, table)


def encode_stochastic(
    values: Tensor,
    scales: Tensor,
    block_size: int,
    table: QuantizationTable,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return one of the two codes around each value over its block's scale: uint8 [count].

    Each is as likely as the value is near to it, so that codes mean the value on average, but for
    2^-24 of their distance: random numbers are float32. What is in the table has its own code, and
    what exceeds it the largest. `generator`, torch's global one by default, is on the values'
    device.
    """
    magnitudes = _quotients(values, scales, block_size)
    entries = table.magnitudes.to(values.device)
    below = torch.searchsorted(entries, magnitudes, right=True) - 1
    above = (below + 1).clamp_max(len(entries) - 1)
    distances = entries[above] - entries[below]
    chance = torch.rand(len(values), generator=generator, device=values.device)
    goes_up = chance * distances < magnitudes - entries[below]
    return _signed(torch.where(goes_up, above, below), values, table)


def decode(codes: Tensor, scales: Tensor, block_size: int, table: QuantizationTable) -> Tensor:
    """Return the codes' values times their block's scale, float32 [count]."""
    values = table.values.to(codes.device)[codes.long()]
    return (in_blocks(values, block_size) * scales.unsqueeze(1)).flatten()[: len(codes)]


def in_blocks(values: Tensor, block_size: int) -> Tensor:
    """Return the values as [blocks, block_size], the last one filled up with zeros."""
    missing = -len(values) % block_size
    return torch.nn.functional.pad(values, (0, missing)).view(-1, block_size)


def _quotients(values: Tensor, scales: Tensor, block_size: int) -> Tensor:
    """Return the magnitudes over their block's scale, float32 [count]."""
    quotients = in_blocks(finite(values), block_size) / scales.unsqueeze(1)
    # A block of zeros has the scale 0, and 0 / 0 is NaN.
    known = torch.where(scales.unsqueeze(1) > 0, quotients, 0.0)
    return known.abs().flatten()[: len(values)]


def _signed(indices: Tensor, values: Tensor, table: QuantizationTable) -> Tensor:
    negative = (finite(values) < 0) & (indices > 0)
    return (indices + table.most * negative).to(torch.uint8)


@dataclass(frozen=True)
class EightBit(Codec):
    """Eight bits a value by one of `TABLES`, scaled block by block.

    A block's scale is its largest magnitude, which is sent with it: 4 bytes for `block_size`
    values. With an `offset` (section 3.1: 10^1 for most activations, up to 10^4) it is the scale of
    all, nothing is sent, and magnitudes above it become the largest of the table.

    Values become the nearest of the table's or, if `stochastic`, one of the two around them by
    chance, so that they are right on average: all but those above its largest, which in dynamic8
    and static8 is 0.99 and 0.97 of a block's scale. Torch's global generator decides; there are no
    kernels for it, so that encoding is slower. Receivers need not know.
    """

    type: str
    block_size: int = 1024
    offset: float | None = None
    stochastic: bool = False

    def __post_init__(self) -> None:
        table(self.type)
        if self.block_size < 1:
            raise InvalidInput("block_size", "a block has at least one value", got=self.block_size)
        if self.offset is not None and not 0 < self.offset < float("inf"):
            raise InvalidInput("offset", "must be a positive number", got=self.offset)

    @property
    def name(self) -> str:
        """The type, and what a receiver must have in common with the sender."""
        scale = f"/{self.block_size}" if self.offset is None else f"*{self.offset:g}"
        return f"{self.type}{scale}"

    def encode(self, values: Tensor) -> Payload:
        """Return the values, float32, encoded; what is not finite is zero, and counted."""
        values = flat(values)
        # Without an offset each block's scale is its largest finite magnitude.
        scales = self._fixed_scales(values) if self.offset else None
        # Short tensors are not padded to a block.
        block_size, chosen = min(self.block_size, max(1, len(values))), table(self.type)
        if not self.stochastic and values.is_cpu:
            codes = torch.empty(len(values), dtype=torch.uint8)
            finds_scales = scales is None
            if scales is None:
                scales = torch.empty(-(-len(values) // block_size))
            num_threads = torch.get_num_threads()
            num_lost = encode_into(
                codes, scales, values, block_size, chosen.codebook, finds_scales, num_threads
            )
        elif not self.stochastic and has_triton(values):
            from paceline.codecs import triton_kernels

            codes, scales, num_found = triton_kernels.encode(values, scales, block_size, chosen)
            num_lost = int(num_found)
        else:
            if scales is None:
                scales = scales_of(values, block_size)
            specified = encode_stochastic if self.stochastic else encode
            codes = specified(values, scales, block_size, chosen)
            num_lost = num_nonfinite(values)
        buffers = (codes,) if self.offset else (scales.view(torch.uint8), codes)
        return Payload(self.name, len(values), buffers, num_lost)

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
        return count + (0 if self.offset else 4 * -(-count // self.block_size))

    def _check(self, payload: Payload) -> None:
        scales_nbytes = () if self.offset else (self.nbytes(payload.count) - payload.count,)
        payload.check(self.name, (*scales_nbytes, payload.count))

    def _fixed_scales(self, values: Tensor) -> Tensor:
        assert self.offset is not None
        num_blocks = -(-len(values) // self.block_size)
        return torch.full((num_blocks,), self.offset, device=values.device)

    def _decode(self, payload: Payload, values: Tensor, adds: bool) -> None:
        # Short tensors are not padded to a block.
        block_size, chosen = min(self.block_size, max(1, len(values))), table(self.type)
        codes = payload.buffers[-1]
        if self.offset:
            scales = self._fixed_scales(values)
        else:
            scales = as_type(payload.buffers[0], torch.float32)
        # Kernels index flat memory; a part of a row or of a larger tensor may have gaps.
        fits = values.is_contiguous() and codes.is_contiguous()
        if fits and values.is_cpu:
            num_threads = torch.get_num_threads()
            decode_into(values, codes, scales, block_size, chosen.codebook, adds, num_threads)
        elif fits and has_triton(values):
            from paceline.codecs import triton_kernels

            triton_kernels.decode(values, codes, scales, block_size, chosen, adds)
        else:
            decoded = decode(codes, scales, block_size, chosen)
            values.copy_(values + decoded if adds else decoded)


def has_triton(values: Tensor) -> bool:
    """Return True if the Triton kernels can be used for the values."""
    return device_of(values.device).has_triton and _triton_compiles()


@cache
def _triton_compiles() -> bool:
    """Return True if there is Triton, and the C compiler with which it builds its launchers."""
    compilers = (os.environ.get("CC"), shutil.which("gcc"), shutil.which("clang"))
    return find_spec("triton") is not None and any(compilers)
