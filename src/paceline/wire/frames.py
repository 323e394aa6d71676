"""The frames of the wire: a fixed header, and a piece of a message's raw bytes.

Every transmission is two frames: a header of fixed size and at most PIECE_NBYTES of payload. Larger
messages travel in pieces, in order, so that each is a sign of life and no buffer of a socket is
ever large. Both frames carry a CRC-32, which notices every corrupted byte. Nothing is pickled.

The first six bytes of a header, and that a refusal is a text, are the same in every version of the
protocol: two versions can tell each other apart.
"""

import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview

MAGIC = b"PCLW"
PROTOCOL = 1
PIECE_NBYTES = 256 * 1024
MOST_PARTS = 8
NAME_NBYTES = 24
NONCE_NBYTES = 8
NO_NONCE = bytes(NONCE_NBYTES)
MOST_TOTAL_NBYTES = 1 << 40

_PREFIX = struct.Struct("<4sBB")
_FIXED = struct.Struct(f"<4sBBH8sIIQQqq24s24s{MOST_PARTS}QQI")
_CHECKSUM = struct.Struct("<I")
HEADER_NBYTES = _FIXED.size + _CHECKSUM.size


class Kind(IntEnum):
    """What a frame is for. From the worker, from the hub, or both."""

    HELLO = 1  # worker: may I join? Parts: run id, layout, the session to resume
    WELCOME = 2  # hub: yes. Parts: the session, credit, settings
    REFUSED = 3  # hub: no, and it stays so. A text
    BUSY = 4  # hub: not now, for this number is in use. A text
    REQUEST = 5
    REPLY = 6
    BEAT = 7  # both: a sign of life
    RESET = 8  # hub: this connection is of no use; connect anew
    BYE = 9  # worker: I am done


class Malformed(ValueError):
    """Bytes that are no frames of this protocol; says what is wrong with them."""


class OtherProtocol(Malformed):
    """Frames of another version of the protocol: `protocol`, and what `kind` they are in it."""

    def __init__(self, protocol: int, kind: int) -> None:
        super().__init__(f"protocol {protocol} in place of {PROTOCOL}")
        self.protocol, self.kind = protocol, kind


@dataclass(frozen=True, slots=True)
class Header:
    """What is said of a piece: whose, of which message, and where in it.

    `run` is a nonce made of the run's id. `arrived` is the sequence up to which its sender has
    all replies. `sizes` are the bytes of the message's parts, `offset` is where the piece begins in
    all of them together. In a WELCOME `sequence` is the last request that the hub has.
    """

    kind: Kind
    run: bytes = NO_NONCE
    worker: int = 0
    sequence: int = 0
    arrived: int = 0
    step: int = 0
    version: int = 0
    topic: str = ""
    codec: str = ""
    sizes: tuple[int, ...] = ()
    offset: int = 0

    @property
    def total_nbytes(self) -> int:
        """Bytes of all parts of the message."""
        return sum(self.sizes)


def pack(header: Header, piece: Buffer) -> bytes:
    """Return the header frame of a piece."""
    sizes = header.sizes + (0,) * (MOST_PARTS - len(header.sizes))
    fixed = _FIXED.pack(
        MAGIC,
        PROTOCOL,
        header.kind,
        len(header.sizes),
        header.run,
        header.worker,
        memoryview(piece).nbytes,
        header.sequence,
        header.arrived,
        header.step,
        header.version,
        header.topic.encode("ascii"),
        header.codec.encode("ascii"),
        *sizes,
        header.offset,
        zlib.crc32(piece),
    )
    return fixed + _CHECKSUM.pack(zlib.crc32(fixed))


def unpack(frame: Buffer, piece: Buffer) -> Header:
    """Return what a header frame says; Malformed if it, or the piece, is not as it was sent."""
    fixed = _checked(frame)
    _, _, kind, num_parts, run, worker, nbytes, sequence, arrived, *rest = _FIXED.unpack(fixed)
    step, version, topic, codec, *numbers = rest
    *sizes, offset, checksum = numbers
    if memoryview(piece).nbytes != nbytes:
        raise Malformed(f"a piece of {memoryview(piece).nbytes} bytes where {nbytes} were sent")
    if zlib.crc32(piece) != checksum:
        raise Malformed(f"a piece of {nbytes} bytes whose checksum is wrong")
    _check_sizes(num_parts, sizes, offset, nbytes)
    return Header(
        kind=_kind(kind),
        run=run,
        worker=worker,
        sequence=sequence,
        arrived=arrived,
        step=step,
        version=version,
        topic=_name(topic),
        codec=_name(codec),
        sizes=tuple(sizes[:num_parts]),
        offset=offset,
    )


def _checked(frame: Buffer) -> memoryview:
    """Return the header without its checksum, which is right."""
    view = memoryview(frame)
    if view.nbytes < _PREFIX.size or view[:4] != MAGIC:
        raise Malformed(f"{view.nbytes} bytes that are no header")
    _, protocol, kind = _PREFIX.unpack_from(view)
    if view.nbytes == HEADER_NBYTES:
        fixed = view[: _FIXED.size]
        (checksum,) = _CHECKSUM.unpack(view[_FIXED.size :])
        if zlib.crc32(fixed) == checksum and protocol == PROTOCOL:
            return fixed
    if protocol != PROTOCOL:
        raise OtherProtocol(protocol, kind)
    raise Malformed(f"a header of {view.nbytes} bytes that is cut off or whose checksum is wrong")


def _check_sizes(num_parts: int, sizes: list[int], offset: int, nbytes: int) -> None:
    if num_parts > MOST_PARTS or any(sizes[num_parts:]):
        raise Malformed(f"{num_parts} parts, of which at most {MOST_PARTS} have a size")
    total = sum(sizes)
    if total > MOST_TOTAL_NBYTES or offset + nbytes > total or nbytes > PIECE_NBYTES:
        raise Malformed(f"a piece of {nbytes} bytes at {offset} of a message of {total}")
    if total and not nbytes:
        raise Malformed(f"nothing of a message of {total} bytes")


def _kind(number: int) -> Kind:
    try:
        return Kind(number)
    except ValueError as error:
        raise Malformed(f"kind {number}, which there is not") from error


def _name(padded: bytes) -> str:
    name = padded.rstrip(b"\0")
    text = name.decode("ascii", errors="replace")
    if not (text.isascii() and text.isprintable()):
        raise Malformed("a name that is not printable ASCII")
    return text
