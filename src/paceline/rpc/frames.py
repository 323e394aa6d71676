"""Encode and decode the frames of messages between the hub and its workers.

Every transmission has two frames: a header, and a piece of at most PIECE_NBYTES. A larger message
is split into several pieces, so that socket buffers stay small, and every arriving piece shows that
the sender is alive. A CRC-32 of each frame detects corrupted bytes. Nothing is pickled. The first
six bytes of a header and the text of a REFUSED are the same in all protocol versions.
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
PROTOCOL = 3
PIECE_NBYTES = 256 * 1024  # small enough that a heartbeat between two pieces is never late
MAX_PARTS = 8
MAX_MESSAGE_NBYTES = 1 << 40
SESSION_NBYTES = 8
NO_SESSION = bytes(SESSION_NBYTES)

_TOPIC_NBYTES = 24
_PREFIX = struct.Struct("<4sBB")
_FIXED = struct.Struct(f"<4sBBHIIQQqq{_TOPIC_NBYTES}s{MAX_PARTS}QQI")
_CHECKSUM = struct.Struct("<I")
HEADER_NBYTES = _FIXED.size + _CHECKSUM.size


class MessageKind(IntEnum):
    """The kind of a message in the protocol between hub and worker."""

    HELLO = 1  # from a worker: asks to join. Parts: run id, release, session to resume
    WELCOME = 2  # from the hub: accepted. Parts: session, largest message, settings
    REFUSED = 3  # from the hub: the worker must not try again. Content: the reason
    BUSY = 4  # from the hub: the number is in use, try again later. Content: the reason
    REQUEST = 5
    REPLY = 6
    HEARTBEAT = 7  # from the hub or a worker
    RESET = 8  # from the hub: the connection is unusable, so the worker connects again
    BYE = 9  # from a worker: the worker leaves the run


_KINDS = frozenset(MessageKind)


class ProtocolError(ValueError):
    """Raised for an invalid frame, or for a message that the protocol does not allow now."""


class VersionMismatch(ProtocolError):
    """Raised for a frame of another protocol version; `kind`: the number of its message kind."""

    def __init__(self, protocol: int, kind: int) -> None:
        super().__init__(f"protocol version {protocol} instead of {PROTOCOL}")
        self.protocol, self.kind = protocol, kind


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """The header of a piece: the fields of its message, and the piece's position.

    `worker`: the number of the worker that sends a HELLO. `acknowledged`: the sender has received
    all replies up to this number. `sizes`: the bytes of each part of the message. `offset`: the
    position of the piece in the concatenated parts. In a WELCOME, `sequence` is the number of the
    last request that the hub has received.
    """

    kind: MessageKind
    worker: int = 0
    sequence: int = 0
    acknowledged: int = 0
    step: int = 0
    version: int = 0
    topic: str = ""
    sizes: tuple[int, ...] = ()
    offset: int = 0

    @property
    def total_nbytes(self) -> int:
        """The bytes of the whole message."""
        return sum(self.sizes)


def pack(header: FrameHeader, piece: Buffer) -> bytes:
    """Encode the header of a piece."""
    origin = (MAGIC, PROTOCOL, header.kind, len(header.sizes), header.worker)
    numbers = (header.sequence, header.acknowledged, header.step, header.version)
    topic = header.topic.encode("ascii")
    sizes = header.sizes + (0,) * (MAX_PARTS - len(header.sizes))
    place = (*sizes, header.offset, zlib.crc32(piece))
    fixed = _FIXED.pack(*origin, memoryview(piece).nbytes, *numbers, topic, *place)
    return fixed + _CHECKSUM.pack(zlib.crc32(fixed))


def unpack(frame: Buffer, piece: Buffer) -> FrameHeader:
    """Decode and verify the header of a piece; raise ProtocolError for any corruption."""
    _, _, kind, num_parts, worker, nbytes, *rest = _FIXED.unpack(_verified(frame))
    sequence, acknowledged, step, version, topic, *sizes, offset, checksum = rest
    if memoryview(piece).nbytes != nbytes or zlib.crc32(piece) != checksum:
        raise ProtocolError(f"a piece of {nbytes} bytes, cut off or with a wrong checksum")
    if num_parts > MAX_PARTS or any(sizes[num_parts:]):
        raise ProtocolError(
            f"{num_parts} parts: must be at most {MAX_PARTS}, and one per size in the header"
        )
    total = sum(sizes)
    is_within = total <= MAX_MESSAGE_NBYTES and offset + nbytes <= total and nbytes <= PIECE_NBYTES
    if not is_within or (total and not nbytes):  # only an empty message has an empty piece
        problem = f"an invalid piece: {nbytes} bytes at byte {offset} of a {total}-byte message"
        raise ProtocolError(problem)
    if kind not in _KINDS:
        raise ProtocolError(f"unknown message kind {kind}")
    topic = topic.rstrip(b"\0").decode("ascii", errors="replace")
    if not (topic.isascii() and topic.isprintable()):
        raise ProtocolError("a topic that is not printable ASCII")
    numbers, used = (sequence, acknowledged, step, version), tuple(sizes[:num_parts])
    return FrameHeader(MessageKind(kind), worker, *numbers, topic, used, offset)


def _verified(frame: Buffer) -> memoryview:
    """Verify a header frame, and return it without its checksum."""
    view = memoryview(frame)
    if view.nbytes < _PREFIX.size or view[:4] != MAGIC:
        raise ProtocolError(f"{view.nbytes} bytes that are not a header")
    _, protocol, kind = _PREFIX.unpack_from(view)
    if view.nbytes == HEADER_NBYTES:
        fixed = view[: _FIXED.size]
        (checksum,) = _CHECKSUM.unpack(view[_FIXED.size :])
        if zlib.crc32(fixed) == checksum and protocol == PROTOCOL:
            return fixed
    if protocol != PROTOCOL:
        raise VersionMismatch(protocol, kind)
    raise ProtocolError(f"a header of {view.nbytes} bytes, cut off or with a wrong checksum")


@dataclass(frozen=True)
class Message:
    """A request or a reply: a topic, and raw bytes in at most eight parts.

    The protocol transmits `step` and `version`, but does not interpret them. Parts are contiguous
    buffers, such as `memoryview(array)`, and are not copied: the sender must not change a request
    before its reply arrives, nor a reply before the worker acknowledges it. The receiver owns
    received parts.
    """

    topic: str
    step: int = 0
    version: int = 0
    parts: tuple[Buffer, ...] = ()

    def __post_init__(self) -> None:
        topic = self.topic
        if not (topic.isascii() and topic.isprintable() and len(topic) <= _TOPIC_NBYTES):
            problem = f"must be at most {_TOPIC_NBYTES} printable ASCII characters"
            raise InvalidInput("topic", problem, got=topic)
        if len(self.parts) > MAX_PARTS:
            raise InvalidInput("parts", f"must be at most {MAX_PARTS}", got=len(self.parts))

    @property
    def nbytes(self) -> int:
        """The bytes of all parts."""
        return sum(memoryview(part).nbytes for part in self.parts)


NO_CONTENT = Message("")


class MessagePiece(NamedTuple):
    """The two frames of one transmission: a header, and a piece of a message."""

    frame: bytes
    payload: Buffer


def split(header: FrameHeader, message: Message) -> Iterator[MessagePiece]:
    """Yield the pieces of a message; the message's fields replace those of `header`."""
    views = []
    for part in message.parts:
        view = memoryview(part)
        # memoryview.cast fails for an empty view of several dimensions.
        views.append(view.cast("B") if view.nbytes else memoryview(b""))
    header = replace(header, step=message.step, version=message.version, topic=message.topic)
    header = replace(header, sizes=tuple(view.nbytes for view in views))
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
    """Splits the messages that `next_message` returns into pieces to send."""

    def __init__(self, next_message: Callable[[], tuple[FrameHeader, Message] | None]) -> None:
        self._next_message = next_message
        self._pieces: Iterator[MessagePiece] = iter(())
        self._first: MessagePiece | None = None

    def send(self, send: Callable[[MessagePiece], bool]) -> bool | None:
        """Call `send` with the next piece; return its result, or None without a piece."""
        if self._first is None:
            self._first = next(self._pieces, None)
        if self._first is None and (following := self._next_message()) is not None:
            self._pieces = split(*following)
            self._first = next(self._pieces)
        if self._first is None:
            return None
        if is_sent := send(self._first):
            self._first = None
        return is_sent


class Assembly:
    """Assembles a message from pieces that arrive in order."""

    def __init__(self) -> None:
        self._first: FrameHeader | None = None
        self._parts: list[NDArray[np.uint8]] = []
        self._filled = 0

    def add(self, header: FrameHeader, payload: Buffer) -> Message | None:
        """Add the next piece; return the message if it is complete.

        Raises ProtocolError for a piece out of order.
        """
        # `acknowledged` grows while a message is sent; all other fields stay constant.
        constant = replace(header, offset=0, acknowledged=0)
        if self._first is None:
            self._first, self._filled = constant, 0
            # np.empty uses physical memory only when it is written. So memory is not exhausted
            # if a header announces a large message that never arrives.
            self._parts = [np.empty(nbytes, np.uint8) for nbytes in header.sizes]
        first = self._first
        if constant != first or header.offset != self._filled:
            raise ProtocolError(f"byte {header.offset} of message {header.sequence}, out of order")
        # A piece may contain the end of one part and the beginning of other parts.
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
        return Message(first.topic, first.step, first.version, parts)


def single_parts(header: FrameHeader, payload: Buffer, count: int) -> tuple[bytes, ...]:
    """Return the parts of a message; ProtocolError unless it is one piece with `count` parts."""
    is_whole = not header.offset and header.total_nbytes == memoryview(payload).nbytes
    if not is_whole or len(header.sizes) != count:
        raise ProtocolError(f"a {header.kind.name} that is not one piece with {count} parts")
    content = io.BytesIO(payload)
    return tuple(content.read(size) for size in header.sizes)
