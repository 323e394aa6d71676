"""What all codecs have in common."""

from typing import Protocol

import torch
from torch import Tensor

from paceline.codecs.payload import Payload
from paceline.core.errors import InvalidInput


class Codec(Protocol):
    """Turns tensors into fewer bytes, and back, not without loss. It keeps nothing of a tensor."""

    @property
    def name(self) -> str:
        """The name that payloads carry."""
        ...

    @property
    def fixed_size(self) -> bool:
        """Whether so many values always take `nbytes`, and not at most that many."""
        ...

    def encode(self, values: Tensor) -> Payload:
        """Return the values, float32 of any shape and stride, encoded in the order of `flatten`.

        NaN and infinite values become zero, and are counted in the payload.
        """
        ...

    def decode(self, payload: Payload, out: Tensor | None = None) -> Tensor:
        """Return the values, float32 [count], in `out` if it is given.

        InvalidInput if this codec has not made the payload.
        """
        ...

    def add_to(self, total: Tensor, payload: Payload) -> None:
        """Add the values to `total`, float32 [count]."""
        ...

    def nbytes(self, count: int) -> int:
        """Return how many bytes `count` values take; at most, where that depends on them."""
        ...


def flat(values: Tensor) -> Tensor:
    """Return the values as a contiguous float32 tensor of one dimension."""
    if values.dtype != torch.float32:
        raise InvalidInput(f"values: {values.dtype} cannot be encoded; give float32")
    return values.detach().reshape(-1).contiguous()


def check(payload: Payload, codec: str, sizes: tuple[int, ...]) -> None:
    """Raise InvalidInput unless the payload is of that codec, with buffers of these sizes."""
    if payload.codec != codec:
        raise InvalidInput(f"payload: made by codec {payload.codec!r}, and not by {codec!r}")
    found = tuple(buffer.numel() for buffer in payload.buffers)
    if found != sizes:
        raise InvalidInput(
            f"payload: {payload.count} values by {codec!r} are buffers of {sizes} bytes, "
            f"not {found}"
        )


def check_target(target: Tensor, payload: Payload) -> None:
    """Raise InvalidInput unless `target` is float32 and as long as the payload."""
    if target.dtype != torch.float32 or target.shape != (payload.count,):
        raise InvalidInput(
            f"payload: {payload.count} values do not fit into {target.dtype} {list(target.shape)}"
        )


def target_for(payload: Payload, out: Tensor | None) -> Tensor:
    """Return `out`, or a new tensor for what the payload decodes to."""
    if out is None:
        return torch.empty(payload.count, device=payload.buffers[-1].device)
    check_target(out, payload)
    return out


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as uint8."""
    return tensor.view(torch.uint8)


def as_type(buffer: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a buffer as values of a type, copied if it does not begin on a whole one."""
    aligned = buffer if buffer.data_ptr() % dtype.itemsize == 0 else buffer.clone()
    return aligned.view(dtype)
