"""The interface of codecs, their payloads, and `Cast`, the codec of torch's types.

A payload is sent as a row of bytes whose length both ends know beforehand: an int64 header (number
of non-finite values, number of buffers, bytes of each), then the buffers, padded to a whole int64.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from paceline.core.errors import InvalidInput
from paceline.native import DType, cast_into

# Types with a C++ cast, which counts non-finite values in the same pass.
_NATIVE = {"half": DType.FLOAT16, "bfloat16": DType.BFLOAT16}
_HEADER = 2 + 3  # int64: a payload has at most three buffers
_HEADER_NBYTES = 8 * _HEADER


@dataclass(frozen=True, eq=False)
class Payload:
    """`count` encoded values: uint8 buffers in the format of `codec`.

    `num_nonfinite` of the values were NaN or infinite, and are encoded as zero.
    """

    codec: str
    count: int
    buffers: tuple[Tensor, ...]
    num_nonfinite: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(buffer.numel() for buffer in self.buffers)

    def check(self, codec: str, sizes: tuple[int, ...]) -> None:
        """Raise InvalidInput unless `codec` encoded it into buffers of these sizes."""
        if self.codec != codec:
            raise InvalidInput("payload", f"must be encoded by {codec!r}", got=self.codec)
        found = tuple(buffer.numel() for buffer in self.buffers)
        if found != sizes:
            problem = f"must have buffers of {sizes} bytes for {self.count} values"
            raise InvalidInput("payload", problem, got=found)

    def check_target(self, target: Tensor) -> None:
        """Raise InvalidInput unless `target` is float32 and as long as the payload."""
        if target.dtype != torch.float32 or target.shape != (self.count,):
            got = f"{target.dtype} {list(target.shape)}"
            raise InvalidInput("payload", f"needs a float32 tensor of {self.count} values", got=got)

    def target(self, out: Tensor | None) -> Tensor:
        """Return `out`, or a new tensor, to decode into."""
        if out is None:
            return torch.empty(self.count, device=self.buffers[-1].device)
        self.check_target(out)
        return out


class Codec(Protocol):
    """Encodes tensors in fewer bytes, with loss, and decodes them."""

    @property
    def name(self) -> str:
        """The name in its payloads."""

    @property
    def fixed_size(self) -> bool:
        """Whether `count` values always take `nbytes(count)`, instead of at most that."""
        return True

    @property
    def encodes_sums(self) -> bool:
        """Whether an all-reduce may encode sums; otherwise it encodes each rank's own values."""
        return True

    def encode(self, values: Tensor) -> Payload:
        """Encode float32 values of any shape and stride, in the order of `flatten`.

        NaN and infinite values become zero, and are counted in the payload.
        """

    def decode(self, payload: Payload, out: Tensor | None = None) -> Tensor:
        """Decode to float32 [count], into `out` if given.

        InvalidInput if another codec encoded the payload.
        """

    def add_to(self, total: Tensor, payload: Payload) -> None:
        """Add the values to `total`, float32 [count]."""
        payload.check_target(total)
        total += self.decode(payload)

    def nbytes(self, count: int) -> int:
        """Return the bytes of `count` values; the maximum if the size varies."""


def flat(values: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values as a contiguous tensor of one dimension; InvalidInput for other types."""
    if values.dtype != dtype:
        raise InvalidInput("values", f"must be {dtype}", got=values.dtype)
    return values.detach().reshape(-1).contiguous()


def as_type(buffer: Tensor, dtype: torch.dtype) -> Tensor:
    """View a buffer as values of a type; copy it if its address is not aligned."""
    aligned = buffer if buffer.data_ptr() % dtype.itemsize == 0 else buffer.clone()
    return aligned.view(dtype)


def row_nbytes(payload_nbytes: int) -> int:
    """Return the bytes of a row with a payload of `payload_nbytes`."""
    return _HEADER_NBYTES + -(-payload_nbytes // 8) * 8


def pack(payloads: Sequence[Payload], nbytes: int, device: torch.device) -> Tensor:
    """Write payloads into rows, uint8 [payloads, nbytes], on a device."""
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
    """Read the payloads of rows, `count` values each; InvalidInput if sizes do not fit."""
    headers = rows[:, :_HEADER_NBYTES].contiguous().cpu().view(torch.int64).tolist()
    payloads = []
    for row, (num_nonfinite, num_buffers, *all_sizes) in zip(rows, headers, strict=True):
        sizes = all_sizes[: max(0, num_buffers)]
        # Another rank wrote the header, perhaps with another codec.
        if min(sizes, default=0) < 0 or _HEADER_NBYTES + sum(sizes) > len(row):
            problem = f"must be the same on all ranks: {len(row)} bytes hold no buffers of {sizes}"
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
    """Rounds float32 values to a type of torch, such as `half` or `bfloat16`.

    Values beyond the type's range count as non-finite: half ends at 65,504. `exact`: the values
    have this type already, and are kept, including the non-finite ones, which are still counted.
    """

    type: str
    exact: bool = False

    @property
    def name(self) -> str:
        """The type."""
        return self.type

    def encode(self, values: Tensor) -> Payload:
        """Encode values in the order of `flatten`."""
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
        """Decode to [count], into `out` if given."""
        encoded = self._encoded(payload)
        if not self.exact:
            return payload.target(out).copy_(encoded)
        return encoded.clone() if out is None else out.copy_(encoded)

    def add_to(self, total: Tensor, payload: Payload) -> None:
        """Add the values to `total`, [count]."""
        if not self.exact:
            payload.check_target(total)
        total += self._encoded(payload)

    def nbytes(self, count: int) -> int:
        """Return the bytes of `count` values."""
        return self._dtype.itemsize * count

    @cached_property
    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.type)
        return dtype

    def _encoded(self, payload: Payload) -> Tensor:
        payload.check(self.name, (self.nbytes(payload.count),))
        return as_type(payload.buffers[0], self._dtype)
