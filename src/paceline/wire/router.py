"""The hub's socket: one address, many connections, each with a queue that is bounded."""

import errno
from collections.abc import Iterator
from typing import NamedTuple

import zmq

from paceline.core.errors import InvalidInput
from paceline.wire.addresses import Address
from paceline.wire.frames import Buffer
from paceline.wire.keys import HubKeys
from paceline.wire.line import QUEUED_PIECES, limit
from paceline.wire.messages import Piece

_FRAMES = 3  # route, header, piece


class Unreachable(Exception):
    """The connection is gone."""


class Arrival(NamedTuple):
    """What came, and from which connection; `is_piece` if it was a header and a piece."""

    route: bytes
    frame: Buffer
    payload: Buffer
    sender: str
    is_piece: bool = True


class Router:
    """A ROUTER socket that never drops what it was given for a connection that stands."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", at: Address, keys: HubKeys | None
    ) -> None:
        self.socket = context.socket(zmq.ROUTER)
        limit(self.socket)
        self.socket.set(zmq.ROUTER_MANDATORY, 1)
        self.socket.set(zmq.IPV6, int(at.is_ipv6))
        if keys is not None:
            self.socket.set(zmq.CURVE_SECRETKEY, keys.secret)
            self.socket.set(zmq.CURVE_SERVER, 1)
        try:
            self.socket.bind(at.to_bind)
        except zmq.ZMQError as error:
            self.close()
            in_use = error.errno == errno.EADDRINUSE
            why = "is in use" if in_use else f"cannot be bound: {error.strerror}"
            raise InvalidInput(f"bind: {at} {why}") from error

    @property
    def address(self) -> str:
        """The address as it was bound."""
        endpoint = self.socket.get(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        return endpoint.rstrip(b"\0").decode()

    def receive(self) -> Iterator[Arrival]:
        """Yield what is there, but let others have their turn."""
        for _ in range(4 * QUEUED_PIECES):
            try:
                frames = self.socket.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            route, sender = frames[0].bytes, _sender(frames[-1])
            if len(frames) == _FRAMES:
                yield Arrival(route, frames[1].buffer, frames[2].buffer, sender)
            else:
                yield Arrival(route, b"", b"", sender, is_piece=False)

    def send(self, route: bytes, piece: Piece) -> bool:
        """Send a piece; False if the connection has as many as it takes for now.

        Raises Unreachable if there is no such connection any more.
        """
        try:
            self.socket.send_multipart((route, piece.frame, piece.payload), zmq.DONTWAIT)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                raise Unreachable from error
            raise
        return True

    def close(self) -> None:
        """Close every connection, and drop what was not sent yet."""
        self.socket.close(linger=0)


def _sender(frame: zmq.Frame) -> str:
    try:
        return str(frame.get("Peer-Address"))
    except zmq.ZMQError:
        return "an unknown address"
