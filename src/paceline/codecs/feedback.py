"""Error feedback: what a codec loses is added to what it encodes next (Seide et al. 2014)."""

import torch
from torch import Tensor

from paceline.codecs.codec import Codec, flat
from paceline.codecs.payload import Payload
from paceline.core.errors import InvalidInput


class ErrorFeedback:
    """A codec that remembers what the codec within it has lost, for one tensor of a fixed size.

    Values that are not finite leave no error behind: they are counted by the codec within.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self._error: Tensor | None = None

    @property
    def name(self) -> str:
        """That of the codec within, which reads the payloads as well."""
        return self.codec.name

    @property
    def fixed_size(self) -> bool:
        """Whether that of the codec within is fixed."""
        return self.codec.fixed_size

    def encode(self, values: Tensor) -> Payload:
        """Return the values and the last error, encoded; keep what that loses."""
        values = flat(values)
        if self._error is not None:
            if self._error.shape != values.shape:
                raise InvalidInput(
                    f"values: {len(values)} of them, but the error is that of {len(self._error)}; "
                    "give each tensor an ErrorFeedback of its own"
                )
            values = values + self._error
        payload = self.codec.encode(values)
        self._error = torch.nan_to_num(values - self.codec.decode(payload), 0.0, 0.0, 0.0)
        return payload

    def decode(self, payload: Payload, out: Tensor | None = None) -> Tensor:
        """Return the values, float32 [count], in `out` if it is given."""
        return self.codec.decode(payload, out)

    def add_to(self, total: Tensor, payload: Payload) -> None:
        """Add the values to `total`, float32 [count]."""
        self.codec.add_to(total, payload)

    def nbytes(self, count: int) -> int:
        """Return the bytes of `count` values."""
        return self.codec.nbytes(count)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the error, for a checkpoint."""
        return {} if self._error is None else {"error": self._error.clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take the error of a checkpoint over."""
        error = state.get("error")
        self._error = None if error is None else error.clone()
