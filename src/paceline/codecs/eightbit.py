"""The codec of the 8-bit types: a code for each value, and a scale for each block of them."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from paceline.codecs import blockwise
from paceline.codecs.codec import as_bytes, as_type, check, check_total, flat
from paceline.codecs.payload import Payload
from paceline.codecs.table import Table, table
from paceline.core.errors import InvalidInput
from paceline.native import Codebook, decode_into, encode_into


@dataclass(frozen=True)
class EightBit:
    """Eight bits a value by one of `TABLES`, scaled block by block.

    A block's scale is its largest magnitude, which is sent with it: 4 bytes for `block_size`
    values. With an `offset` (section 3.1: 10^1 for most activations, up to 10^4) it is the scale of
    all, nothing is sent, and magnitudes above it become the largest of the table.
    """

    type: str
    block_size: int = 1024
    offset: float | None = None

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
        codes = torch.empty(len(values), dtype=torch.uint8, device=values.device)
        scales = self._fixed_scales(values) if self.offset else self._no_scales(values)
        prepared = _prepared(self.type)
        if values.is_cpu:
            num_nonfinite = encode_into(
                codes,
                scales,
                values,
                self.block_size,
                prepared.book,
                self.offset is None,
                torch.get_num_threads(),
            )
        else:
            if self.offset is None:
                scales = blockwise.scales_of(values, self.block_size)
            codes = blockwise.encode(values, scales, self.block_size, prepared.table)
            num_nonfinite = int((~values.isfinite()).sum())
        buffers = (codes,) if self.offset else (as_bytes(scales), codes)
        return Payload(self.name, len(values), buffers, num_nonfinite)

    def decode(self, payload: Payload) -> Tensor:
        """Return the values, float32 [count]."""
        self._check(payload)
        values = torch.empty(payload.count, device=payload.buffers[-1].device)
        self._decode(payload, values, adds=False)
        return values

    def add_to(self, total: Tensor, payload: Payload) -> None:
        """Add the values to `total`, float32 [count]."""
        self._check(payload)
        check_total(total, payload)
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
        prepared = _prepared(self.type)
        if values.is_cpu:
            decode_into(
                values, codes, scales, self.block_size, prepared.book, adds, torch.get_num_threads()
            )
            return
        decoded = blockwise.decode(codes, scales, self.block_size, prepared.table)
        values.copy_(values + decoded if adds else decoded)

    def _check(self, payload: Payload) -> None:
        scales_nbytes = () if self.offset else (4 * self._num_blocks(payload.count),)
        check(payload, self.name, (*scales_nbytes, payload.count))

    def _num_blocks(self, count: int) -> int:
        return -(-count // self.block_size)

    def _no_scales(self, values: Tensor) -> Tensor:
        return torch.empty(self._num_blocks(len(values)), device=values.device)

    def _fixed_scales(self, values: Tensor) -> Tensor:
        assert self.offset is not None
        return torch.full((self._num_blocks(len(values)),), self.offset, device=values.device)


@dataclass(frozen=True, eq=False)
class _Prepared:
    table: Table
    book: Codebook


@cache
def _prepared(name: str) -> _Prepared:
    """Return a table, and what the kernels make of it."""
    one = table(name)
    return _Prepared(one, Codebook(one.magnitudes.tolist(), one.thresholds.tolist()))
