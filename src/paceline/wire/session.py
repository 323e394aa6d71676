"""A worker as the hub's end of the wire sees it."""

import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from paceline.wire.frames import NO_NONCE, NONCE_NBYTES, Buffer, Header, Kind
from paceline.wire.ledger import Ledger
from paceline.wire.messages import Assembly, Message, Piece, pieces


def new_token() -> bytes:
    """Return eight random bytes that no other session has, of this hub or of one before it."""
    token = NO_NONCE
    while token == NO_NONCE:
        token = os.urandom(NONCE_NBYTES)
    return token


@dataclass(eq=False)
class Session:
    """All that a worker and the hub know of each other, over one connection or several.

    `route` is the connection, None while there is none; that is since `closed_s`.
    """

    worker: int
    ledger: Ledger
    token: bytes = field(default_factory=new_token)
    route: bytes | None = None
    heard_s: float = field(default_factory=time.monotonic)
    closed_s: float = field(default_factory=time.monotonic)
    _assembly: Assembly | None = None
    _to_send: deque[int] = field(default_factory=deque)
    _sending: Iterator[Piece] = field(default_factory=lambda: iter(()))
    _stuck: Piece | None = None

    def connect(self, route: bytes) -> None:
        """Go on over a new connection: send what may not have arrived."""
        self._begin(route)
        self._to_send.extend(self.ledger.unacknowledged)

    def disconnect(self) -> None:
        """Go on without a connection."""
        self._begin(None)
        self.closed_s = time.monotonic()

    def _begin(self, route: bytes | None) -> None:
        self.route = route
        self._assembly, self._stuck, self._sending = None, None, iter(())
        self._to_send.clear()

    def take(self, header: Header, payload: Buffer) -> Message | None:
        """Take a piece of a request; return the request when it is complete and new.

        Of one that was complete before, the reply is sent again, if there is one. Malformed if the
        piece does not fit, or exceeds what this worker may have at the hub.
        """
        if not self.ledger.check(header.sequence, header.total_nbytes):
            self.queue(header.sequence)
            return None
        self._assembly = self._assembly or Assembly(header)
        message = self._assembly.add(header, payload)
        if message is not None:
            self._assembly = None
            self.ledger.take(header.sequence, header.total_nbytes)
        return message

    def queue(self, sequence: int) -> None:
        """Have the reply to a request sent, if there is one that is not waiting for that."""
        known = self.ledger.reply(sequence)
        if self.route is not None and known is not None and sequence not in self._to_send:
            self._to_send.append(sequence)

    def next_piece(self, run: bytes) -> Piece | None:
        """Return the next piece of a reply to send, if there is a connection to send it over."""
        if self.route is None:
            return None
        piece, self._stuck = self._stuck or next(self._sending, None), None
        while piece is None and self._to_send:
            sequence = self._to_send.popleft()
            reply = self.ledger.reply(sequence)
            if reply is not None:
                header = Header(Kind.REPLY, run, self.worker, sequence)
                self._sending = pieces(header, reply)
                piece = next(self._sending)
        return piece

    def keep(self, piece: Piece) -> None:
        """Have a piece that could not be sent be the next again, unless the connection is gone."""
        if self.route is not None:
            self._stuck = piece

    @property
    def is_stuck(self) -> bool:
        """Whether a piece waits for room in the connection."""
        return self._stuck is not None
