"""The codec of the 8-bit types: a code for each value, and a scale for each block of them."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from paceline.codecs import kernels
from paceline.codecs.codec import as_bytes, as_type, check, check_target, flat, target_for
from paceline.codecs.payload import Payload
from paceline.codecs.table import table
from paceline.core.errors import InvalidInput


@dataclass(frozen=True)
class EightBit:
    """Eight bits a value by one of `TABLES`, scaled block by block.

    A block's scale is its largest magnitude, which is sent with it: 4 bytes for `block_size`
    values. With an `offset` (section 3.1: 10^1 for most activations, up to 10^4) it is the scale of
    all, nothing is sent, and magnitudes above it become the largest of the table.

    Values become the nearest of the table's or, if `stochastic`, one of the two around them by
    chance, so that they are right on average: all but those above its largest, which in dynamic8
    and static8 is 0.99 and 0.97 of a block's scale. Torch's global generator decides; there are no
    kernels for it, so that encoding is slower. Receivers need not know.
    """

    fixed_size: ClassVar[bool] = True

    type: str
    block_size: int = 1024
    offset: float | None = None
    stochastic: bool = False

    def __post_init__(self) -> None:
        table(self.type)
        if self.block_size < 1:
            raise InvalidInput(f"block_size: a block has at least one value, not {self.block_size}")
        if self.offset is not None and not 0 < self.offset < float("inf"):
            raise InvalidInput(f"offset: must be a positive number, not {self.offset}")

    @property
    def name(self) -> str:
        """The type, and what a receiver must have in common with the sender."""
        scale = f"/{self.block_size}" if self.offset is None else f"*{self.offset:g}"
        return f"{self.type}{scale}"

    def encode(self, values: Tensor) -> Payload:
        """Return the values, float32, encoded; what is not finite is zero, and counted."""
        values = flat(values)
        encode = kernels.encode_stochastic if self.stochastic else kernels.encode
        fixed = self._fixed_scales(values) if self.offset else None
        codes, scales, num_nonfinite = encode(values, fixed, self.block_size, self.type)
        buffers = (codes,) if self.offset else (as_bytes(scales), codes)
        return Payload(self.name, len(values), buffers, num_nonfinite)

    def decode(self, payload: Payload, out: Tensor | None = None) -> Tensor:
        """Return the values, float32 [count], in `out` if it is given."""
        self._check(payload)
        values = target_for(payload, out)
        self._decode(payload, values, adds=False)
        return values

    def add_to(self, total: Tensor, payload: Payload) -> None:
        """Add the values to `total`, float32 [count]."""
        self._check(payload)
        check_target(total, payload)
        self._decode(payload, total, adds=True)

    def nbytes(self, count: int) -> int:
        """Return the bytes of `count` values."""
        return count + (0 if self.offset else 4 * self._num_blocks(count))

    def _decode(self, payload: Payload, values: Tensor, adds: bool) -> None:
        codes = payload.buffers[-1]
        scales = (
            self._fixed_scales(values)
            if self.offset
            else as_type(payload.buffers[0], torch.float32)
        )
        kernels.decode(values, codes, scales, self.block_size, self.type, adds)

    def _check(self, payload: Payload) -> None:
        scales_nbytes = () if self.offset else (4 * self._num_blocks(payload.count),)
        check(payload, self.name, (*scales_nbytes, payload.count))

    def _num_blocks(self, count: int) -> int:
        return -(-count // self.block_size)

    def _fixed_scales(self, values: Tensor) -> Tensor:
        assert self.offset is not None
        return torch.full((self._num_blocks(len(values)),), self.offset, device=values.device)
