"""Torch's own types: sixteen bits a value, or all 32."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from paceline.codecs.codec import as_bytes, as_type, check, check_target, flat, target_for
from paceline.codecs.payload import Payload

_DTYPES = {"half": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Cast:
    """Values rounded to `half` or `bfloat16`, or left as they are in `float32`.

    What the type cannot hold counts as not finite: half ends at 65,504.
    """

    fixed_size: ClassVar[bool] = True

    name: str

    def encode(self, values: Tensor) -> Payload:
        """Return the values, float32, encoded; what is not finite is zero, and counted."""
        rounded = flat(values).to(_DTYPES[self.name])
        finite = rounded.isfinite()
        num_nonfinite = len(rounded) - int(finite.sum())
        if num_nonfinite:
            rounded = torch.where(finite, rounded, torch.zeros_like(rounded))
        return Payload(self.name, len(rounded), (as_bytes(rounded),), num_nonfinite)

    def decode(self, payload: Payload, out: Tensor | None = None) -> Tensor:
        """Return the values, float32 [count], in `out` if it is given."""
        check(payload, self.name, (self.nbytes(payload.count),))
        rounded = as_type(payload.buffers[0], _DTYPES[self.name])
        return target_for(payload, out).copy_(rounded)

    def add_to(self, total: Tensor, payload: Payload) -> None:
        """Add the values to `total`, float32 [count]."""
        check_target(total, payload)
        total += self.decode(payload)

    def nbytes(self, count: int) -> int:
        """Return the bytes of `count` values."""
        return _DTYPES[self.name].itemsize * count
