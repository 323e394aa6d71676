"""Messages: what is asked and answered, in pieces on the way and put together again."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from paceline.core.errors import InvalidInput
from paceline.wire.frames import (
    MOST_PARTS,
    NAME_NBYTES,
    PIECE_NBYTES,
    Buffer,
    Header,
    Malformed,
    pack,
)

_NUM_NUMBERS = 2**63  # of each sign


@dataclass(frozen=True)
class Message:
    """What one side tells the other: a topic, and raw bytes in at most eight parts.

    `step` and `version` are for those who talk, as is `codec`, which says how the parts are to be
    read. `topic` and `codec` are at most 24 printable ASCII characters. Parts are contiguous
    buffers (`memoryview(array)`); they are not copied, so that they must stay as they are until a
    request is answered, or a reply has arrived. Those of a message that came are the receiver's.
    """

    topic: str
    step: int = 0
    version: int = 0
    codec: str = ""
    parts: tuple[Buffer, ...] = ()

    def __post_init__(self) -> None:
        for field, name in (("topic", self.topic), ("codec", self.codec)):
            if not (name.isascii() and name.isprintable() and len(name) <= NAME_NBYTES):
                raise InvalidInput(
                    f"{field}: {name!r} is not at most {NAME_NBYTES} printable ASCII characters"
                )
        for field, number in (("step", self.step), ("version", self.version)):
            if not -_NUM_NUMBERS <= number < _NUM_NUMBERS:
                raise InvalidInput(f"{field}: {number} does not fit into 64 bits")
        if len(self.parts) > MOST_PARTS:
            raise InvalidInput(f"parts: {len(self.parts)} are more than {MOST_PARTS}")

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(memoryview(part).nbytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class Piece:
    """One transmission: its header as it is meant, and the two frames."""

    header: Header
    frame: bytes
    payload: Buffer

    @property
    def is_last(self) -> bool:
        """Whether the message is complete with it."""
        return self.header.offset + memoryview(self.payload).nbytes == self.header.total_nbytes


def pieces(header: Header, message: Message) -> Iterator[Piece]:
    """Yield a message in pieces. `header` says all but what the message itself says."""
    views = [_flat(part) for part in message.parts]
    header = replace(
        header,
        step=message.step,
        version=message.version,
        topic=message.topic,
        codec=message.codec,
        sizes=tuple(view.nbytes for view in views),
    )
    if header.total_nbytes <= PIECE_NBYTES:
        whole = b"".join(views)
        yield Piece(header, pack(header, whole), whole)
        return
    offset = 0
    for view in views:
        for begin in range(0, view.nbytes, PIECE_NBYTES):
            piece = view[begin : begin + PIECE_NBYTES]
            header = replace(header, offset=offset)
            yield Piece(header, pack(header, piece), piece)
            offset += piece.nbytes


class Assembly:
    """A message that comes in pieces, each where the one before has ended."""

    def __init__(self, first: Header) -> None:
        self._first = replace(first, offset=0, arrived=0)
        # Memory that is not yet written costs nothing: a message that never comes takes none.
        self._parts = [np.empty(nbytes, np.uint8) for nbytes in first.sizes]
        self._filled = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the whole message."""
        return self._first.total_nbytes

    def add(self, header: Header, piece: Buffer) -> Message | None:
        """Put a piece in its place; return the message when it is complete.

        Malformed if the piece is of another message, or not the next.
        """
        if replace(header, offset=0, arrived=0) != self._first or header.offset != self._filled:
            raise Malformed(
                f"byte {header.offset} of message {header.sequence}, where byte {self._filled} of "
                f"message {self._first.sequence} was to follow"
            )
        self._fill(memoryview(piece))
        if self._filled < self.nbytes:
            return None
        first = self._first
        parts = tuple(part.data for part in self._parts)
        return Message(first.topic, first.step, first.version, first.codec, parts)

    def _fill(self, piece: memoryview) -> None:
        begin = self._filled
        self._filled += piece.nbytes
        for part in self._parts:
            if not piece.nbytes:
                return
            if begin < part.nbytes:
                fits = min(part.nbytes - begin, piece.nbytes)
                part[begin : begin + fits] = np.frombuffer(piece[:fits], np.uint8)
                piece = piece[fits:]
                begin += fits
            begin -= part.nbytes


def whole(header: Header, piece: Buffer) -> Message:
    """Return a message that must have come in a single piece; Malformed if it did not."""
    if header.offset or header.total_nbytes != memoryview(piece).nbytes:
        raise Malformed(f"a {header.kind.name} in several pieces")
    message = Assembly(header).add(header, piece)
    assert message is not None
    return message


def _flat(part: Buffer) -> memoryview:
    view = memoryview(part)
    if not view.nbytes:
        return memoryview(b"")
    if not view.c_contiguous:
        raise InvalidInput("parts: a part is not contiguous in memory; copy it before")
    return view.cast("B")
