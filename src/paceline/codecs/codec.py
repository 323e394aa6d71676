"""The interface of all codecs, the payloads that they make, and `Cast`, the codec of torch's types.

A payload travels as a row of bytes whose length both ends know beforehand: a header of int64, which
says how many values were not finite, how many buffers there are and how long each is; then the
buffers, padded to a whole int64.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from paceline.core.errors import InvalidInput
from paceline.native import DType, cast_into

# The types to which there is a native cast, which counts what is not finite as it goes.
_NATIVE = {"half": DType.FLOAT16, "bfloat16": DType.BFLOAT16}
_HEADER = 2 + 3  # int64: a payload has at most three buffers
_HEADER_NBYTES = 8 * _HEADER


@dataclass(frozen=True, eq=False)
class Payload:
    """`count` values as a codec has encoded them: uint8 buffers that only it can read.

    `num_nonfinite` of the values were NaN or infinite, and stand there as zero.
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
        """Raise InvalidInput unless that codec has made it, with buffers of these sizes."""
        if self.codec != codec:
            raise InvalidInput("payload", f"made by codec {self.codec!r}, and not by {codec!r}")
        found = tuple(buffer.numel() for buffer in self.buffers)
        if found != sizes:
            raise InvalidInput(
                "payload",
                f"{self.count} values by {codec!r} are buffers of {sizes} bytes, not {found}",
            )

    def check_target(self, target: Tensor) -> None:
        """Raise InvalidInput unless `target` is float32 and as long as the payload."""
        if target.dtype != torch.float32 or target.shape != (self.count,):
            raise InvalidInput(
                "payload",
                f"{self.count} values do not fit into {target.dtype} {list(target.shape)}",
            )

    def target(self, out: Tensor | None) -> Tensor:
        """Return `out`, or a new tensor for what it decodes to."""
        if out is None:
            return torch.empty(self.count, device=self.buffers[-1].device)
        self.check_target(out)
        return out


class Codec(Protocol):
    """Encodes tensors in fewer bytes, with loss, and decodes them; it keeps no tensor."""

    @property
    def name(self) -> str:
        """The name that payloads carry."""

    @property
    def fixed_size(self) -> bool:
        """True if values always take `nbytes`; False if they take at most that many."""
        return True

    @property
    def encodes_sums(self) -> bool:
        """True if an all-reduce may encode sums again; False if only what each rank has itself."""
        return True

    def encode(self, values: Tensor) -> Payload:
        """Return the values, float32 of any shape and stride, encoded in the order of `flatten`.

        NaN and infinite values become zero, and are counted in the payload.
        """

    def decode(self, payload: Payload, out: Tensor | None = None) -> Tensor:
        """Return the values, float32 [count], in `out` if it is given.

        InvalidInput if this codec has not made the payload.
        """

    def add_to(self, total: Tensor, payload: Payload) -> None:
        """Add the values to `total`, float32 [count]."""
        payload.check_target(total)
        total += self.decode(payload)

    def nbytes(self, count: int) -> int:
        """Return the bytes of `count` values: the maximum, where that depends on them."""


def flat(values: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values, which are of that type, as a contiguous tensor of one dimension."""
    if values.dtype != dtype:
        right = str(dtype).removeprefix("torch.")
        raise InvalidInput("values", f"{values.dtype} cannot be encoded", hint=f"give {right}")
    return values.detach().reshape(-1).contiguous()


def as_type(buffer: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a buffer as values of a type, copied if its address is not aligned for it."""
    aligned = buffer if buffer.data_ptr() % dtype.itemsize == 0 else buffer.clone()
    return aligned.view(dtype)


def row_nbytes(payload_nbytes: int) -> int:
    """Return the bytes of a row for a payload of so many, padded to a whole int64."""
    return _HEADER_NBYTES + -(-payload_nbytes // 8) * 8


def pack(payloads: Sequence[Payload], nbytes: int, device: torch.device) -> Tensor:
    """Return the payloads as rows, uint8 [payloads, nbytes], on a device."""
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
    """Return the payloads of rows, `count` values each; InvalidInput if sizes do not fit."""
    headers = rows[:, :_HEADER_NBYTES].contiguous().cpu().view(torch.int64).tolist()
    payloads = []
    for row, (num_nonfinite, num_buffers, *all_sizes) in zip(rows, headers, strict=True):
        sizes = all_sizes[: max(0, num_buffers)]
        # The header comes from another rank, which may use another codec.
        if min(sizes, default=0) < 0 or _HEADER_NBYTES + sum(sizes) > len(row):
            raise InvalidInput(
                "codec",
                f"a row of {len(row)} bytes speaks of buffers of {sizes} bytes: do all ranks use "
                "the same codec?",
            )
        parts = row[_HEADER_NBYTES : _HEADER_NBYTES + sum(sizes)].split(sizes)
        payloads.append(Payload(codec, count, tuple(parts), num_nonfinite))
    return payloads


def finite(values: Tensor) -> Tensor:
    """Return the values with zero for those that are NaN or infinite."""
    return torch.where(values.isfinite(), values, 0.0)


def num_nonfinite(values: Tensor) -> int:
    """Return the number of values that are NaN or infinite."""
    return len(values) - int(values.isfinite().sum())


@dataclass(frozen=True)
class Cast(Codec):
    """Values in the type of torch that has this name, as `half`, `bfloat16` or `float32`.

    Float32 values are rounded to it, and what it cannot hold counts as not finite: half ends at
    65,504. With `exact` they are values of that type already, which nothing is lost of: what is
    not finite is counted too, but kept.
    """

    type: str
    exact: bool = False

    @property
    def name(self) -> str:
        """The type."""
        return self.type

    def encode(self, values: Tensor) -> Payload:
        """Return the values encoded, in the order of `flatten`."""
        given = flat(values, self._dtype if self.exact else torch.float32)
        if not self.exact and given.is_cpu and self.type in _NATIVE:
            return self._rounded(given)
        encoded = given.to(self._dtype)
        num_lost = num_nonfinite(encoded) if self._dtype.is_floating_point else 0
        if num_lost and not self.exact:
            encoded = finite(encoded)
        return Payload(self.name, len(encoded), (encoded.view(torch.uint8),), num_lost)

    def decode(self, payload: Payload, out: Tensor | None = None) -> Tensor:
        """Return the values, [count], in `out` if it is given."""
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

    def _rounded(self, values: Tensor) -> Payload:
        """Return what the operations above do to values on the CPU, in one pass over them."""
        rounded = torch.empty(self.nbytes(len(values)), dtype=torch.uint8)
        num_lost = cast_into(rounded, values, _NATIVE[self.type], torch.get_num_threads())
        return Payload(self.name, len(values), (rounded,), num_lost)

    def _encoded(self, payload: Payload) -> Tensor:
        payload.check(self.name, (self.nbytes(payload.count),))
        return as_type(payload.buffers[0], self._dtype)
