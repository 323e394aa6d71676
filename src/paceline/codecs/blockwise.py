"""The codec of the 8-bit types: values scaled block by block, by the kernels of their device."""

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.codecs import kernels
from paceline.codecs.codec import Codec, Payload, as_type, flat
from paceline.codecs.quantization import table
from paceline.core.errors import InvalidInput


class BlockCodec(Codec):
    """A codec whose payloads are checked, and then decoded into values or added to them."""

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

    @abstractmethod
    def _check(self, payload: Payload) -> None: ...

    @abstractmethod
    def _decode(self, payload: Payload, values: Tensor, adds: bool) -> None: ...


@dataclass(frozen=True)
class EightBit(BlockCodec):
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
        given = self._fixed_scales(values) if self.offset else None
        block_size = self._block_size(len(values))
        codes, scales, num_lost = kernels.encode(values, given, block_size, table(self.type))
        buffers = (codes,) if self.offset else (scales.view(torch.uint8), codes)
        return Payload(self.name, len(values), buffers, num_lost)

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

    def _block_size(self, count: int) -> int:
        """Return the block size for so many values: short tensors are not padded to a block."""
        return min(self.block_size, max(1, count))

    def _decode(self, payload: Payload, values: Tensor, adds: bool) -> None:
        if self.offset:
            scales = self._fixed_scales(values)
        else:
            scales = as_type(payload.buffers[0], torch.float32)
        block_size, codes = self._block_size(len(values)), payload.buffers[-1]
        kernels.decode(values, codes, scales, block_size, table(self.type), adds)
