"""One bit a value (Seide et al. 2014): its sign, and a mean for each sign of a block."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from paceline.codecs.blockwise import in_blocks
from paceline.codecs.codec import as_bytes, as_type, check, check_target, flat, target_for
from paceline.codecs.payload import Payload
from paceline.core.errors import InvalidInput

_BITS = 8


@dataclass(frozen=True)
class OneBit:
    """A value becomes the mean of its block's values that are negative, or of those that are not.

    These are the two levels with the least squared error. Much is lost: use it in `ErrorFeedback`.
    """

    fixed_size: ClassVar[bool] = True

    block_size: int = 1024

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise InvalidInput(f"block_size: a block has at least one value, not {self.block_size}")

    @property
    def name(self) -> str:
        """What a receiver must have in common with the sender."""
        return f"onebit/{self.block_size}"

    def encode(self, values: Tensor) -> Payload:
        """Return the values, float32, encoded; what is not finite is zero, and counted."""
        values = flat(values)
        finite = values.isfinite()
        num_nonfinite = len(values) - int(finite.sum())
        values = torch.where(finite, values, torch.zeros_like(values))
        is_negative = values < 0
        levels = torch.stack([self._mean(values, ~is_negative), self._mean(values, is_negative)], 1)
        return Payload(
            self.name,
            len(values),
            (as_bytes(levels.flatten()), _packed(is_negative)),
            num_nonfinite,
        )

    def decode(self, payload: Payload, out: Tensor | None = None) -> Tensor:
        """Return the values, float32 [count], in `out` if it is given."""
        count = payload.count
        check(payload, self.name, (8 * self._num_blocks(count), -(-count // _BITS)))
        levels = as_type(payload.buffers[0], torch.float32).view(-1, 2)
        is_negative = _unpacked(payload.buffers[1], count)
        of_block = levels.repeat_interleave(self.block_size, 0)[:count]
        values = torch.where(is_negative, of_block[:, 1], of_block[:, 0])
        return target_for(payload, out).copy_(values)

    def add_to(self, total: Tensor, payload: Payload) -> None:
        """Add the values to `total`, float32 [count]."""
        check_target(total, payload)
        total += self.decode(payload)

    def nbytes(self, count: int) -> int:
        """Return the bytes of `count` values."""
        return 8 * self._num_blocks(count) + -(-count // _BITS)

    def _mean(self, values: Tensor, chosen: Tensor) -> Tensor:
        total = in_blocks(torch.where(chosen, values, 0.0), self.block_size).sum(1)
        return total / in_blocks(chosen.float(), self.block_size).sum(1).clamp_min(1)

    def _num_blocks(self, count: int) -> int:
        return -(-count // self.block_size)


def _packed(flags: Tensor) -> Tensor:
    """Return eight flags a byte, the first in the lowest bit."""
    weights = torch.tensor([1 << bit for bit in range(_BITS)], device=flags.device)
    return (in_blocks(flags.long(), _BITS) * weights).sum(1).to(torch.uint8)


def _unpacked(packed: Tensor, count: int) -> Tensor:
    bits = torch.arange(_BITS, device=packed.device, dtype=torch.uint8)
    return (packed.unsqueeze(1).bitwise_right_shift(bits) & 1).flatten()[:count].bool()
