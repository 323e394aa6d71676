"""What a worker says to the hub over one connection: HELLO, requests, signs of life, BYE."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from paceline.core.errors import InvalidInput
from paceline.wire.frames import Buffer, Header, Kind, Malformed, OtherProtocol, unpack
from paceline.wire.identity import Identity
from paceline.wire.line import Broken, Line
from paceline.wire.messages import Assembly, Message, Piece, pieces, whole
from paceline.wire.outbox import Outbox
from paceline.wire.texts import one_line
from paceline.wire.traffic import Traffic
from paceline.wire.wake import Wake

BEAT_S = 1.0
SILENT_S = 5.0  # after which a connection is taken for dead
_LOOK_S = 0.25
_WELCOME_S = 5.0
_NUM_WELCOME_PARTS = 3


@dataclass
class Bearing:
    """What outlives a connection, shared by all conversations of a worker.

    `settings` are the hub's. `heard_s` is when it was last heard; it may be away for `deadline_s`.
    `on_join` is told whether the session goes on.
    """

    identity: Identity
    outbox: Outbox
    traffic: Traffic
    wake: Wake
    deadline_s: float
    is_closing: Callable[[], bool]
    on_join: Callable[[bool], None]
    settings: bytes = b""
    heard_s: float = field(default_factory=time.monotonic)


class Conversation:
    """One connection's worth of messages."""

    def __init__(self, line: Line, bearing: Bearing) -> None:
        self._line, self._bearing = line, bearing
        self._told_s = 0.0
        self._assembly: Assembly | None = None
        self._sending: Iterator[Piece] = iter(())
        self._stuck: Piece | None = None

    def hold(self) -> None:
        """Join, and exchange messages until this worker closes.

        Raises Broken or Malformed if another connection is to be made, InvalidInput if the hub
        refuses this worker.
        """
        bearing, line = self._bearing, self._line
        self._join()
        silent_since_s = time.monotonic()
        while not bearing.is_closing():
            is_full = not self._send()
            line.wait(bearing.wake, _LOOK_S, to_send=is_full)
            for frame, payload in line.receive():
                self._hear(frame, payload)
                silent_since_s = time.monotonic()
            if time.monotonic() - silent_since_s > min(SILENT_S, bearing.deadline_s):
                raise Broken("the hub is silent")
        self._put(self._lone(Kind.BYE))

    def _join(self) -> None:
        bearing = self._bearing
        identity = bearing.identity
        parts = (identity.run_id.encode(), identity.layout.encode(), bearing.outbox.session)
        self._put(self._lone(Kind.HELLO, *parts))
        until_s = min(time.monotonic() + _WELCOME_S, bearing.heard_s + bearing.deadline_s)
        while not bearing.is_closing():
            for frame, payload in self._line.receive():
                if self._is_welcome(frame, payload):
                    return
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise Broken("the hub does not answer")
            self._line.wait(bearing.wake, min(left_s, _LOOK_S), to_send=False)

    def _is_welcome(self, frame: Buffer, payload: Buffer) -> bool:
        try:
            header = unpack(frame, payload)
        except OtherProtocol as other:
            if other.kind == Kind.REFUSED:
                raise InvalidInput(_refusal(payload)) from other
            raise
        if header.kind is Kind.REFUSED:
            raise InvalidInput(_refusal(payload))
        if header.kind is Kind.BUSY:
            raise Broken(one_line(bytes(payload).decode(errors="replace")))
        if header.kind is not Kind.WELCOME:
            return False
        self._note(header, payload)
        parts = whole(header, payload).parts
        if len(parts) != _NUM_WELCOME_PARTS:
            raise Malformed("a welcome that is incomplete")
        session, largest, settings = map(bytes, parts)
        largest_nbytes = int.from_bytes(largest, "little")
        self._bearing.settings = settings  # before those who wait to have joined go on
        self._bearing.on_join(self._bearing.outbox.join(session, largest_nbytes, header.sequence))
        return True

    def _send(self) -> bool:
        """Send until nothing is left, or the line is full: then return False."""
        while True:
            if time.monotonic() - self._told_s > BEAT_S:
                self._put(self._lone(Kind.BEAT))
            piece, self._stuck = self._stuck or self._next(), None
            if piece is None:
                return True
            if not self._put(piece):
                self._stuck = piece
                return False

    def _put(self, piece: Piece) -> bool:
        if not self._line.send(piece):
            return False
        self._told_s = time.monotonic()
        self._bearing.traffic.count_sent(piece.header, piece.payload)
        return True

    def _next(self) -> Piece | None:
        piece = next(self._sending, None)
        if piece is None:
            pending = self._bearing.outbox.take()
            if pending is None:
                return None
            self._sending = pieces(self._header(Kind.REQUEST, pending.sequence), pending.message)
            piece = next(self._sending)
        return piece

    def _hear(self, frame: Buffer, payload: Buffer) -> None:
        header = unpack(frame, payload)
        self._note(header, payload)
        if header.kind is Kind.RESET:
            raise Broken("the hub asks to connect anew")
        if header.kind is Kind.REPLY:
            self._assembly = self._assembly or Assembly(header)
            reply = self._assembly.add(header, payload)
            if reply is not None:
                self._assembly = None
                self._bearing.outbox.answer(header.sequence, reply)

    def _note(self, header: Header, payload: Buffer) -> None:
        self._bearing.heard_s = time.monotonic()
        self._bearing.traffic.count_received(header, payload)

    def _header(self, kind: Kind, sequence: int) -> Header:
        identity, arrived = self._bearing.identity, self._bearing.outbox.arrived
        return Header(kind, identity.nonce, identity.worker, sequence, arrived)

    def _lone(self, kind: Kind, *parts: bytes) -> Piece:
        """Return a message of a single piece that is no request."""
        header = self._header(kind, self._bearing.outbox.last)
        return next(pieces(header, Message("", parts=parts)))


def _refusal(payload: Buffer) -> str:
    text = one_line(bytes(payload).decode(errors="replace"))
    return f"the hub refuses this worker: {text}"
