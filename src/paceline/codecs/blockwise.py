"""Codecs that encode each value in 8 or 4 bits, with one scale for each block of values."""

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.codecs import kernels
from paceline.codecs.codec import Codec, Payload, as_type, flat
from paceline.codecs.quantization import FOUR_BIT_TABLES, TABLES, EncodedBlocks, table
from paceline.core.errors import InvalidInput
from paceline.core.names import not_known


class BlockCodec(Codec):
    """Base class of codecs that divide each block of values by a scale before rounding.

    A block has `block_size` values. Its scale is their largest magnitude, and is sent as 4 bytes.
    If `offset` is set, all blocks have this number as their scale, which is not sent.
    """

    type: str
    block_size: int
    offset: float | None = None

    @property
    def name(self) -> str:
        """The type and block size or offset, such as "dynamic8/1024"."""
        scale = f"/{self.block_size}" if self.offset is None else f"*{self.offset:g}"
        return f"{self.type}{scale}"

    def encode(self, values: Tensor) -> Payload:
        """Encode float32 values; NaN and infinite values become zero, and are counted."""
        values = flat(values)
        fixed, block_size = self._fixed_scales(values), self._block_size(len(values))
        codes, scales, num_lost = kernels.encode(values, fixed, block_size, table(self.type))
        buffers = (scales.view(torch.uint8), codes) if fixed is None else (codes,)
        return Payload(self.name, len(values), buffers, num_lost)

    def decode(self, payload: Payload, out: Tensor | None = None) -> Tensor:
        """Decode a payload to float32 values [count]; write them into `out` if given."""
        payload.check(self.name, self._sizes(payload.count))
        values = payload.target(out)
        self._decode(payload, values, adds=False)
        return values

    def add_to(self, total: Tensor, payload: Payload) -> None:
        """Add a payload's decoded values to `total`, a float32 tensor [count]."""
        payload.check(self.name, self._sizes(payload.count))
        payload.check_target(total)
        self._decode(payload, total, adds=True)

    def nbytes(self, count: int) -> int:
        """Return the payload size in bytes for `count` values."""
        return sum(self._sizes(count))

    def _sizes(self, count: int) -> tuple[int, ...]:
        """Return the size of each buffer in bytes: the scales (if sent), then the codes."""
        codes = -(-count * table(self.type).num_bits // 8)
        return (4 * -(-count // self.block_size), codes) if self.offset is None else (codes,)

    def _block_size(self, count: int) -> int:
        """Return `block_size` or, if less, `count` rounded up to whole bytes of codes."""
        per_byte = 8 // table(self.type).num_bits
        return min(self.block_size, max(1, -(-count // per_byte)) * per_byte)

    def _fixed_scales(self, values: Tensor) -> Tensor | None:
        if self.offset is None:
            return None
        num_blocks = -(-len(values) // self.block_size)
        return torch.full((num_blocks,), self.offset, device=values.device)

    def _decode(self, payload: Payload, values: Tensor, adds: bool) -> None:
        scales, block_size = self._fixed_scales(values), self._block_size(len(values))
        if scales is None:
            scales = as_type(payload.buffers[0], torch.float32)
        encoded = EncodedBlocks(payload.buffers[-1], scales, block_size, table(self.type))
        kernels.decode(values, encoded, adds)


@dataclass(frozen=True)
class EightBit(BlockCodec):
    """Encodes each value in eight bits, with the magnitudes `TABLES[type]`.

    `offset`: the scale of all blocks, which is not sent; larger magnitudes are clipped to the
    offset. If None, each block has its own scale. Dettmers 2016, section 3.1, uses offsets of 10
    for most activations, and up to 10^4.
    """

    type: str
    block_size: int = 1024
    offset: float | None = None

    def __post_init__(self) -> None:
        if self.type not in TABLES:
            raise not_known("type", self.type, TABLES)
        if self.block_size < 1:
            raise InvalidInput("block_size", "must be at least 1", got=self.block_size)
        if self.offset is not None and not 0 < self.offset < float("inf"):
            raise InvalidInput("offset", "must be a positive number", got=self.offset)


@dataclass(frozen=True)
class FourBit(BlockCodec):
    """Encodes each value in four bits, with the magnitudes `FOUR_BIT_TABLES[type]`.

    `block_size` must be even.
    """

    type: str
    block_size: int = 1024

    def __post_init__(self) -> None:
        if self.type not in FOUR_BIT_TABLES:
            raise not_known("type", self.type, FOUR_BIT_TABLES)
        if self.block_size < 2 or self.block_size % 2:
            problem = "must be even, because two values share a byte"
            raise InvalidInput("block_size", problem, got=self.block_size)

    @property
    def encodes_sums(self) -> bool:
        """False: ranks do not encode sums of decoded values, which would be rounded twice."""
        return False
