"""Frames and messages: a fixed header, and a piece of a message's raw bytes.

Every transmission is two frames: a header of fixed size and at most PIECE_NBYTES of payload. Larger
messages travel in pieces, in order, so that each piece is a sign of life and a socket's buffers
stay small. Both frames carry a CRC-32, which detects every corrupted byte. Nothing is pickled.

The first six bytes of a header, and that the payload of a REFUSED is text, are the same in every
version of the protocol, so that two versions can recognize each other.
"""

import io
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import InvalidInput

Buffer: TypeAlias = bytes | bytearray | memoryview

MAGIC = b"PCLW"
PROTOCOL = 2
PIECE_NBYTES = 256 * 1024  # small enough that a heartbeat between two pieces is never late
MAX_PARTS = 8
MAX_MESSAGE_NBYTES = 1 << 40
NONCE_NBYTES = 8
NO_NONCE = bytes(NONCE_NBYTES)

_NAME_NBYTES = 24
_PREFIX = struct.Struct("<4sBB")
_FIXED = struct.Struct(f"<4sBBH8sIIQQqq{_NAME_NBYTES}s{_NAME_NBYTES}s{MAX_PARTS}QQI")
_CHECKSUM = struct.Struct("<I")
HEADER_NBYTES = _FIXED.size + _CHECKSUM.size


class MessageKind(IntEnum):
    """The purpose of a message."""

    HELLO = 1  # from a worker: asks to join. Parts: run id, release, session to resume
    WELCOME = 2  # from the hub: accepted. Parts: session, largest message, settings
    REFUSED = 3  # from the hub: refused for good. A text
    BUSY = 4  # from the hub: refused for now, because the worker's number is in use. A text
    REQUEST = 5
    REPLY = 6
    HEARTBEAT = 7  # from both
    RESET = 8  # from the hub: the connection is unusable, connect again
    BYE = 9  # from a worker: it leaves


_KINDS = frozenset(MessageKind)


class ProtocolError(ValueError):
    """Received bytes that are not frames of this protocol, or not allowed at this point."""


class VersionMismatch(ProtocolError):
    """Frames of protocol version `protocol`, in which they are of kind `kind`."""

    def __init__(self, protocol: int, kind: int) -> None:
        super().__init__(f"protocol {protocol} in place of {PROTOCOL}")
        self.protocol, self.kind = protocol, kind


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """The description of a piece: its message, and its place in it.

    `nonce` identifies the run. `acknowledged` is the sequence number up to which the sender has all
    replies. `sizes` are the bytes of the message's parts; `offset` is where the piece begins in
    their concatenation. In a WELCOME, `sequence` is that of the last complete request.
    """

    kind: MessageKind
    nonce: bytes = NO_NONCE
    worker: int = 0
    sequence: int = 0
    acknowledged: int = 0
    step: int = 0
    version: int = 0
    topic: str = ""
    codec: str = ""
    sizes: tuple[int, ...] = ()
    offset: int = 0

    @property
    def total_nbytes(self) -> int:
        """Return the bytes of all parts of the message."""
        return sum(self.sizes)


def pack(header: FrameHeader, piece: Buffer) -> bytes:
    """Return the header frame of a piece."""
    origin = (MAGIC, PROTOCOL, header.kind, len(header.sizes), header.nonce, header.worker)
    numbers = (header.sequence, header.acknowledged, header.step, header.version)
    names = (header.topic.encode("ascii"), header.codec.encode("ascii"))
    sizes = header.sizes + (0,) * (MAX_PARTS - len(header.sizes))
    place = (*sizes, header.offset, zlib.crc32(piece))
    fixed = _FIXED.pack(*origin, memoryview(piece).nbytes, *numbers, *names, *place)
    return fixed + _CHECKSUM.pack(zlib.crc32(fixed))


def unpack(frame: Buffer, piece: Buffer) -> FrameHeader:
    """Return the header of a piece. Raises ProtocolError unless both frames are as sent."""
    _, _, kind, num_parts, nonce, worker, nbytes, *rest = _FIXED.unpack(_verified(frame))
    sequence, acknowledged, step, version, topic, codec, *sizes, offset, checksum = rest
    if memoryview(piece).nbytes != nbytes:
        raise ProtocolError(f"a piece of {memoryview(piece).nbytes} bytes where {nbytes} were sent")
    if zlib.crc32(piece) != checksum:
        raise ProtocolError(f"a piece of {nbytes} bytes whose checksum is wrong")
    if num_parts > MAX_PARTS or any(sizes[num_parts:]):
        raise ProtocolError(f"{num_parts} parts, of which at most {MAX_PARTS} have a size")
    total = sum(sizes)
    if total > MAX_MESSAGE_NBYTES or offset + nbytes > total or nbytes > PIECE_NBYTES:
        raise ProtocolError(f"a piece of {nbytes} bytes at {offset} of a message of {total}")
    if total and not nbytes:
        # Only an empty message has an empty piece, so that every other piece makes progress.
        raise ProtocolError(f"nothing of a message of {total} bytes")
    if kind not in _KINDS:
        raise ProtocolError(f"kind {kind}, which there is not")
    topic = topic.rstrip(b"\0").decode("ascii", errors="replace")
    codec = codec.rstrip(b"\0").decode("ascii", errors="replace")
    if not ((topic + codec).isascii() and (topic + codec).isprintable()):
        raise ProtocolError("a name that is not printable ASCII")
    numbers, used = (sequence, acknowledged, step, version), tuple(sizes[:num_parts])
    return FrameHeader(MessageKind(kind), nonce, worker, *numbers, topic, codec, used, offset)


def _verified(frame: Buffer) -> memoryview:
    """Return a header frame without its checksum, after verifying it."""
    view = memoryview(frame)
    if view.nbytes < _PREFIX.size or view[:4] != MAGIC:
        raise ProtocolError(f"{view.nbytes} bytes that are no header")
    _, protocol, kind = _PREFIX.unpack_from(view)
    if view.nbytes == HEADER_NBYTES:
        fixed = view[: _FIXED.size]
        (checksum,) = _CHECKSUM.unpack(view[_FIXED.size :])
        if zlib.crc32(fixed) == checksum and protocol == PROTOCOL:
            return fixed
    if protocol != PROTOCOL:
        raise VersionMismatch(protocol, kind)
    raise ProtocolError(
        f"a header of {view.nbytes} bytes that is cut off or whose checksum is wrong"
    )


@dataclass(frozen=True)
class Message:
    """A request or a reply: a topic, and raw bytes in at most eight parts.

    `step`, `version` and `codec` (the encoding of the parts) are for the application. `topic` and
    `codec` are at most 24 printable ASCII characters. Parts are contiguous buffers, such as
    `memoryview(array)`. They are not copied: do not change those of a request before its reply
    came, nor those of a reply before it is acknowledged. The receiver owns the parts of a received
    message. Raises InvalidInput if names or parts do not fit into a header.
    """

    topic: str
    step: int = 0
    version: int = 0
    codec: str = ""
    parts: tuple[Buffer, ...] = ()

    def __post_init__(self) -> None:
        for field, name in (("topic", self.topic), ("codec", self.codec)):
            if not (name.isascii() and name.isprintable() and len(name) <= _NAME_NBYTES):
                raise InvalidInput(
                    field, f"{name!r} is not at most {_NAME_NBYTES} printable ASCII characters"
                )
        if len(self.parts) > MAX_PARTS:
            raise InvalidInput("parts", f"{len(self.parts)} are more than {MAX_PARTS}")

    @property
    def nbytes(self) -> int:
        """Return the bytes of all parts."""
        return sum(memoryview(part).nbytes for part in self.parts)


NO_CONTENT = Message("")


class MessagePiece(NamedTuple):
    """One transmission: the two frames that are sent."""

    frame: bytes
    payload: Buffer


def split(header: FrameHeader, message: Message) -> Iterator[MessagePiece]:
    """Yield the pieces of a message. The fields of `message` replace those of `header`."""
    views = []
    for part in message.parts:
        view = memoryview(part)
        # An empty view of several dimensions cannot be cast.
        views.append(view.cast("B") if view.nbytes else memoryview(b""))
    header = replace(header, step=message.step, version=message.version, codec=message.codec)
    header = replace(header, topic=message.topic, sizes=tuple(view.nbytes for view in views))
    if header.total_nbytes <= PIECE_NBYTES:
        joined = b"".join(views)
        yield MessagePiece(pack(header, joined), joined)
        return
    for view in views:
        for begin in range(0, view.nbytes, PIECE_NBYTES):
            payload = view[begin : begin + PIECE_NBYTES]
            yield MessagePiece(pack(header, payload), payload)
            header = replace(header, offset=header.offset + payload.nbytes)


class PieceQueue:
    """The pieces to be sent over a connection, message after message.

    `next_message` returns the header and the content of the next message; None if there is none.
    """

    def __init__(self, next_message: Callable[[], tuple[FrameHeader, Message] | None]) -> None:
        self._next_message = next_message
        self._pieces: Iterator[MessagePiece] = iter(())
        self._first: MessagePiece | None = None

    @property
    def is_blocked(self) -> bool:
        """Return True if a piece was looked at, but not sent."""
        return self._first is not None

    def peek(self) -> MessagePiece | None:
        """Return the next piece, and keep it until `advance`; None if there is none."""
        if self._first is None:
            self._first = next(self._pieces, None)
        while self._first is None and (following := self._next_message()) is not None:
            self._pieces = split(*following)
            self._first = next(self._pieces, None)
        return self._first

    def advance(self) -> None:
        """Remove the next piece: it was sent."""
        self._first = None


class Assembly:
    """A message that is received in pieces, each beginning where the one before ended."""

    def __init__(self) -> None:
        self._first: FrameHeader | None = None
        self._parts: list[NDArray[np.uint8]] = []
        self._filled = 0

    def add(self, header: FrameHeader, payload: Buffer) -> Message | None:
        """Copy a piece to its place; return the message if it is complete.

        The next piece then begins another message. Raises ProtocolError if the piece belongs to
        another message than the one before, or does not follow it.
        """
        # `acknowledged` grows while a message is sent; all else is the same in each of its pieces.
        constant = replace(header, offset=0, acknowledged=0)
        if self._first is None:
            self._first, self._filled = constant, 0
            # The kernel maps memory when it is written: a large message that never comes takes
            # none.
            self._parts = [np.empty(nbytes, np.uint8) for nbytes in header.sizes]
        first = self._first
        if constant != first or header.offset != self._filled:
            raise ProtocolError(
                f"byte {header.offset} of message {header.sequence}, where byte {self._filled} of "
                f"message {first.sequence} was to follow"
            )
        # Copy the piece behind what is filled; it may end one part and begin others.
        left, begin = memoryview(payload), self._filled
        self._filled += left.nbytes
        for part in self._parts:
            if left.nbytes and begin < part.nbytes:
                fits = min(part.nbytes - begin, left.nbytes)
                part[begin : begin + fits] = np.frombuffer(left[:fits], np.uint8)
                left, begin = left[fits:], begin + fits
            begin -= part.nbytes
        if self._filled < first.total_nbytes:
            return None
        parts = tuple(part.data for part in self._parts)
        self._first, self._parts = None, []
        return Message(first.topic, first.step, first.version, first.codec, parts)


def single_parts(header: FrameHeader, payload: Buffer, count: int) -> tuple[bytes, ...]:
    """Return the parts of a message of one piece. Raises ProtocolError unless they are `count`."""
    name = header.kind.name
    if header.offset or header.total_nbytes != memoryview(payload).nbytes:
        raise ProtocolError(f"a {name} in several pieces")
    if len(header.sizes) != count:
        raise ProtocolError(f"a {name} of {len(header.sizes)} parts")
    content = io.BytesIO(payload)
    return tuple(content.read(size) for size in header.sizes)
