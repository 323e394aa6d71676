"""What a codec makes of a tensor: plain buffers, and the bytes that carry them over a wire."""

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.errors import InvalidInput

_MAGIC, _VERSION = b"PLCE", 1
MOST_BUFFERS = 3
# magic, version, checksum of all that follows it; codec, number of buffers, values, values that
# were not finite, bytes of each buffer
_START = struct.Struct("<4sII")
_REST = struct.Struct(f"<16sQQQ{MOST_BUFFERS}Q")
HEADER_NBYTES = _START.size + _REST.size


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

    def to_bytes(self) -> bytes:
        """Return header and buffers, with a checksum of both."""
        name = self.codec.encode("ascii")
        sizes = [buffer.numel() for buffer in self.buffers]
        sizes += [0] * (MOST_BUFFERS - len(sizes))
        rest = _REST.pack(name, len(self.buffers), self.count, self.num_nonfinite, *sizes)
        parts = [rest, *(buffer.cpu().numpy().tobytes() for buffer in self.buffers)]
        return b"".join([_START.pack(_MAGIC, _VERSION, _checksum(parts)), *parts])

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> "Payload":
        """Return what `to_bytes` made bytes of. InvalidInput if they are not whole and intact."""
        view = memoryview(data)
        if len(view) < HEADER_NBYTES:
            raise InvalidInput(f"payload: {len(view)} bytes; its header has {HEADER_NBYTES}")
        magic, version, checksum = _START.unpack_from(view)
        if magic != _MAGIC:
            raise InvalidInput(f"payload: begins with {magic!r}, and not with {_MAGIC!r}")
        if version != _VERSION:
            raise InvalidInput(f"payload: is of version {version}; this program reads {_VERSION}")
        name, num_buffers, count, num_nonfinite, *sizes = _REST.unpack_from(view, _START.size)
        if num_buffers > MOST_BUFFERS or HEADER_NBYTES + sum(sizes) != len(view):
            raise InvalidInput(
                f"payload: {len(view)} bytes; its header speaks of {num_buffers} buffers of "
                f"{sizes} bytes after {HEADER_NBYTES}"
            )
        if _checksum([view[_START.size :]]) != checksum:
            raise InvalidInput("payload: its checksum is wrong: bytes were changed on the way")
        return cls(
            name.rstrip(b"\0").decode("ascii", "replace"),
            count,
            _cut(view, sizes[:num_buffers]),
            num_nonfinite,
        )


def _cut(view: memoryview, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    whole = (
        torch.frombuffer(bytearray(view[HEADER_NBYTES:]), dtype=torch.uint8)
        if sum(sizes)
        else torch.empty(0, dtype=torch.uint8)
    )
    return torch.split(whole, list(sizes))


def _checksum(parts: Sequence[bytes | memoryview]) -> int:
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return checksum
