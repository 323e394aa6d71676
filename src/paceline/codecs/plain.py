"""Values of any type as they are, where others of them are encoded."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from paceline.codecs.codec import as_bytes, as_type, check
from paceline.codecs.payload import Payload


@dataclass(frozen=True)
class Plain:
    """The codec that loses nothing: the bytes of values of one type.

    Unlike others it leaves what is not finite as it is; it counts that, too.
    """

    fixed_size: ClassVar[bool] = True

    dtype: torch.dtype

    @property
    def name(self) -> str:
        """The type."""
        return str(self.dtype).removeprefix("torch.")

    def encode(self, values: Tensor) -> Payload:
        """Return the values as bytes, in the order of `flatten`."""
        flat = values.detach().reshape(-1).contiguous()
        num_nonfinite = 0
        if self.dtype.is_floating_point:
            num_nonfinite = len(flat) - int(flat.isfinite().sum())
        return Payload(self.name, len(flat), (as_bytes(flat),), num_nonfinite)

    def decode(self, payload: Payload, out: Tensor | None = None) -> Tensor:
        """Return the values, [count], in `out` if it is given."""
        check(payload, self.name, (self.nbytes(payload.count),))
        values = as_type(payload.buffers[0], self.dtype)
        return values.clone() if out is None else out.copy_(values)

    def add_to(self, total: Tensor, payload: Payload) -> None:
        """Add the values to `total`, [count]."""
        check(payload, self.name, (self.nbytes(payload.count),))
        total += as_type(payload.buffers[0], self.dtype)

    def nbytes(self, count: int) -> int:
        """Return the bytes of `count` values."""
        return self.dtype.itemsize * count
