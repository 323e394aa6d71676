"""Sixteen bits a value: torch's own types."""

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.codecs.codec import as_bytes, as_type, check, check_total, flat
from paceline.codecs.payload import Payload

_DTYPES = {"half": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Cast:
    """Values rounded to `half` or `bfloat16`.

    What the type cannot hold counts as not finite: half ends at 65,504.
    """

    name: str

    def encode(self, values: Tensor) -> Payload:
        """Return the values, float32, encoded; what is not finite is zero, and counted."""
        rounded = flat(values).to(_DTYPES[self.name])
        finite = rounded.isfinite()
        num_nonfinite = len(rounded) - int(finite.sum())
        if num_nonfinite:
            rounded = torch.where(finite, rounded, torch.zeros_like(rounded))
        return Payload(self.name, len(rounded), (as_bytes(rounded),), num_nonfinite)

    def decode(self, payload: Payload) -> Tensor:
        """Return the values, float32 [count]."""
        check(payload, self.name, (self.nbytes(payload.count),))
        return as_type(payload.buffers[0], _DTYPES[self.name]).float()

    def add_to(self, total: Tensor, payload: Payload) -> None:
        """Add the values to `total`, float32 [count]."""
        check_total(total, payload)
        total += self.decode(payload)

    def nbytes(self, count: int) -> int:
        """Return the bytes of `count` values."""
        return 2 * count
