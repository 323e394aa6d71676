"""The codec of the 8-bit types: values scaled block by block, by the kernels of their device."""

import os
import shutil
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from paceline.codecs.codec import Codec, Payload, as_type, flat, num_nonfinite
from paceline.codecs.quantization import decode, encode, encode_stochastic, scales_of, table
from paceline.core.errors import InvalidInput
from paceline.links.devices import device_of


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
            num_lost = chosen.codebook.encode_into(
                codes, scales, values, block_size, finds_scales, num_threads
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
            chosen.codebook.decode_into(values, codes, scales, block_size, adds, num_threads)
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
