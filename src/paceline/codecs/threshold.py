"""Only what is large (Strom 2015): where values exceed tau, plus or minus tau is sent."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from paceline.codecs.codec import as_bytes, as_type, check, check_target, flat, target_for
from paceline.codecs.payload import Payload
from paceline.core.errors import InvalidInput

_WORD_NBYTES = 4
_SIGN = 1 << 31  # of a word; the rest is the place of a value


@dataclass(frozen=True)
class Threshold:
    """Values above `tau` in magnitude become tau with their sign, and all others zero.

    Four bytes for each that is sent. What is lost waits as a residual: use it in `ErrorFeedback`.
    """

    fixed_size: ClassVar[bool] = False

    tau: float

    def __post_init__(self) -> None:
        if not 0 < self.tau < float("inf"):
            raise InvalidInput(f"tau: must be a positive number, not {self.tau}")

    @property
    def name(self) -> str:
        """The name that payloads carry; tau travels in them."""
        return "threshold"

    def encode(self, values: Tensor) -> Payload:
        """Return the values, float32, encoded; what is not finite is zero, and counted."""
        values = flat(values)
        if len(values) > _SIGN:
            raise InvalidInput(f"values: {len(values):,} at once; at most {_SIGN:,}")
        finite = values.isfinite()
        places = ((values.abs() > self.tau) & finite).nonzero().flatten()
        words = places - _SIGN * (values[places] < 0)
        tau = torch.tensor([self.tau], device=values.device)
        buffers = as_bytes(tau), as_bytes(words.to(torch.int32))
        return Payload(self.name, len(values), buffers, len(values) - int(finite.sum()))

    def decode(self, payload: Payload, out: Tensor | None = None) -> Tensor:
        """Return the values, float32 [count], in `out` if it is given."""
        self._check(payload)
        values = target_for(payload, out).zero_()
        self.add_to(values, payload)
        return values

    def add_to(self, total: Tensor, payload: Payload) -> None:
        """Add the values to `total`, float32 [count]."""
        self._check(payload)
        check_target(total, payload)
        tau, words = (
            as_type(payload.buffers[0], torch.float32),
            as_type(payload.buffers[1], torch.int32),
        )
        places = words.long() & (_SIGN - 1)
        if len(places) and int(places.max()) >= payload.count:
            raise InvalidInput(f"payload: speaks of more than its {payload.count} values")
        total.index_add_(0, places, torch.where(words < 0, -tau, tau))

    def nbytes(self, count: int) -> int:
        """Return the bytes of `count` values if all were sent."""
        return _WORD_NBYTES * (1 + count)

    def _check(self, payload: Payload) -> None:
        num_words = sum(buffer.numel() for buffer in payload.buffers[1:]) // _WORD_NBYTES
        check(payload, self.name, (_WORD_NBYTES, _WORD_NBYTES * num_words))
        if payload.count > _SIGN:
            raise InvalidInput(f"payload: {payload.count:,} values; at most {_SIGN:,}")
