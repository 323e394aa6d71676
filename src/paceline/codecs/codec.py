"""The interface of codecs, their payloads, and `Cast`, which rounds to a torch dtype.

A payload is sent as a row of bytes, whose length the sender and the receiver know beforehand. The
row begins with a header of int64 values: the number of non-finite values, the number of buffers,
and the size of each buffer in bytes. The buffers follow, padded to a multiple of 8 bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from paceline.core.errors import InvalidInput
from paceline.native import DType, cast_into

# Dtypes with a C++ cast, which also counts the non-finite values.
_NATIVE = {"half": DType.FLOAT16, "bfloat16": DType.BFLOAT16}
_HEADER = 2 + 3  # number of int64 values; a payload has at most three buffers
_HEADER_NBYTES = 8 * _HEADER


@dataclass(frozen=True, eq=False)
class Payload:
    """Holds `count` encoded values as uint8 buffers; `codec` is the name of the codec.

    `num_nonfinite`: number of values that were NaN or infinite. All codecs except an exact `Cast`
    encode such values as zero.
    """

    codec: str
    count: int
    buffers: tuple[Tensor, ...]
    num_nonfinite: int = 0

    @property
    def nbytes(self) -> int:
        """The total size of the buffers in bytes."""
        return sum(buffer.numel() for buffer in self.buffers)

    def check(self, codec: str, sizes: tuple[int, ...]) -> None:
        """Raise InvalidInput unless `codec` made the payload and the buffers have `sizes` bytes."""
        if self.codec != codec:
            raise InvalidInput("payload", f"must be encoded by {codec!r}", got=self.codec)
        found = tuple(buffer.numel() for buffer in self.buffers)
        if found != sizes:
            problem = f"must have buffers of {sizes} bytes for {self.count} values"
            raise InvalidInput("payload", problem, got=found)

    def check_target(self, target: Tensor) -> None:
        """Raise InvalidInput unless `target` is a float32 tensor of shape [count]."""
        if target.dtype != torch.float32 or target.shape != (self.count,):
            got = f"{target.dtype} {list(target.shape)}"
            problem = f"must be decoded to a float32 tensor of {self.count} values"
            raise InvalidInput("payload", problem, got=got)

    def target(self, out: Tensor | None) -> Tensor:
        """Return the tensor to decode into: `out`, or a new tensor if `out` is None."""
        if out is None:
            return torch.empty(self.count, device=self.buffers[-1].device)
        self.check_target(out)
        return out


class Codec(Protocol):
    """Encodes tensors approximately, in fewer bytes, and decodes payloads."""

    @property
    def name(self) -> str:
        """The codec's name, which its payloads contain."""

    @property
    def fixed_size(self) -> bool:
        """Whether a payload of `count` values always has `nbytes(count)` bytes, never fewer."""
        return True

    @property
    def encodes_sums(self) -> bool:
        """Whether an all-reduce may encode sums; if not, ranks encode only their own values."""
        return True

    def encode(self, values: Tensor) -> Payload:
        """Encode float32 values of any shape and stride, in the order of `Tensor.flatten`.

        NaN and infinite values become zero; the payload's `num_nonfinite` counts them.
        """

    def decode(self, payload: Payload, out: Tensor | None = None) -> Tensor:
        """Decode a payload to float32 values [count]; write them into `out` if given.

        Raises InvalidInput if another codec encoded the payload.
        """

    def add_to(self, total: Tensor, payload: Payload) -> None:
        """Add a payload's decoded values to `total`, a float32 tensor [count]."""
        payload.check_target(total)
        total += self.decode(payload)

    def nbytes(self, count: int) -> int:
        """Return the payload size in bytes for `count` values; the maximum if the size varies."""


def flat(values: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values as a contiguous 1-d tensor; InvalidInput if they are not of `dtype`."""
    if values.dtype != dtype:
        raise InvalidInput("values", f"must be {dtype}", got=values.dtype)
    return values.detach().reshape(-1).contiguous()


def as_type(buffer: Tensor, dtype: torch.dtype) -> Tensor:
    """View a uint8 buffer as values of `dtype`; copy the buffer first if it is not aligned."""
    aligned = buffer if buffer.data_ptr() % dtype.itemsize == 0 else buffer.clone()
    return aligned.view(dtype)


def row_nbytes(payload_nbytes: int) -> int:
    """Return the size in bytes of a row: a header and a payload of `payload_nbytes` bytes."""
    return _HEADER_NBYTES + -(-payload_nbytes // 8) * 8


def pack(payloads: Sequence[Payload], nbytes: int, device: torch.device) -> Tensor:
    """Write each payload into one row of a new uint8 tensor [payloads, nbytes] on `device`."""
    rows = torch.empty(len(payloads), nbytes, dtype=torch.uint8, device=device)
    headers = torch.zeros(len(payloads), _HEADER, dtype=torch.int64)
    for row, header, payload in zip(rows, headers, payloads, strict=True):
        sizes = [buffer.numel() for buffer in payload.buffers]
        facts = [payload.num_nonfinite, len(sizes), *sizes]
        header[: len(facts)] = torch.tensor(facts)
        parts = row[_HEADER_NBYTES : _HEADER_NBYTES + sum(sizes)].split(sizes)
        for part, buffer in zip(parts, payload.buffers, strict=True):
            part.copy_(buffer)
    rows[:, :_HEADER_NBYTES] = headers.view(torch.uint8).to(device)
    return rows


def unpack(rows: Tensor, codec: str, count: int) -> list[Payload]:
    """Read a payload of `count` values from each row; InvalidInput if a row is too short."""
    headers = rows[:, :_HEADER_NBYTES].contiguous().cpu().view(torch.int64).tolist()
    payloads = []
    for row, (num_nonfinite, num_buffers, *all_sizes) in zip(rows, headers, strict=True):
        sizes = all_sizes[: max(0, num_buffers)]
        # Check the sizes, because the sending rank may have used another codec.
        if min(sizes, default=0) < 0 or _HEADER_NBYTES + sum(sizes) > len(row):
            problem = f"must be the same on all ranks (got buffers of {sizes} in {len(row)} bytes)"
            raise InvalidInput("codec", problem)
        parts = row[_HEADER_NBYTES : _HEADER_NBYTES + sum(sizes)].split(sizes)
        payloads.append(Payload(codec, count, tuple(parts), num_nonfinite))
    return payloads


def finite(values: Tensor) -> Tensor:
    """Replace NaN and infinite values by zero."""
    return torch.where(values.isfinite(), values, 0.0)


def num_nonfinite(values: Tensor) -> int:
    """Count the NaN and infinite values."""
    return len(values) - int(values.isfinite().sum())


@dataclass(frozen=True)
class Cast(Codec):
    """Rounds float32 values to a torch dtype, such as `half` or `bfloat16`.

    A value beyond the dtype's range (65,504 for half) becomes zero, and counts as non-finite.
    `exact`: the values to encode already have this dtype, and NaN and infinite values are kept.
    """

    type: str
    exact: bool = False

    @property
    def name(self) -> str:
        """The name of the dtype."""
        return self.type

    def encode(self, values: Tensor) -> Payload:
        """Encode values in the order of `Tensor.flatten`."""
        given = flat(values, self._dtype if self.exact else torch.float32)
        if not self.exact and given.is_cpu and self.type in _NATIVE:
            rounded = torch.empty(self.nbytes(len(given)), dtype=torch.uint8)
            num_lost = cast_into(rounded, given, _NATIVE[self.type], torch.get_num_threads())
            return Payload(self.name, len(given), (rounded,), num_lost)
        encoded = given.to(self._dtype)
        num_lost = num_nonfinite(encoded) if self._dtype.is_floating_point else 0
        if num_lost and not self.exact:
            encoded = finite(encoded)
        return Payload(self.name, len(encoded), (encoded.view(torch.uint8),), num_lost)

    def decode(self, payload: Payload, out: Tensor | None = None) -> Tensor:
        """Decode a payload to a tensor [count]; write the values into `out` if given."""
        encoded = self._encoded(payload)
        if not self.exact:
            return payload.target(out).copy_(encoded)
        return encoded.clone() if out is None else out.copy_(encoded)

    def add_to(self, total: Tensor, payload: Payload) -> None:
        """Add a payload's decoded values to `total`, a tensor [count]."""
        if not self.exact:
            payload.check_target(total)
        total += self._encoded(payload)

    def nbytes(self, count: int) -> int:
        """Return the payload size in bytes for `count` values."""
        return self._dtype.itemsize * count

    @cached_property
    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.type)
        return dtype

    def _encoded(self, payload: Payload) -> Tensor:
        payload.check(self.name, (self.nbytes(payload.count),))
        return as_type(payload.buffers[0], self._dtype)
