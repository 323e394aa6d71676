"""One connection of a worker to the hub. When it breaks, another is made."""

import struct
from collections.abc import Iterator
from contextlib import suppress

import zmq

from paceline.wire.addresses import Address
from paceline.wire.frames import PIECE_NBYTES, Buffer
from paceline.wire.keys import ClientKeys
from paceline.wire.messages import Piece
from paceline.wire.wake import Wake

QUEUED_PIECES = 32  # in each direction of a connection; 8 MiB
_HANDSHAKE_MS = 5000
_CONNECT_MS = 5000
_LINGER_MS = 200
_CURVE_NBYTES = 64  # more than what encryption adds to a frame, which counts as its size
_EVENT = struct.Struct("=Hi")
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_EVENTS = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | _FAILED


class Broken(Exception):
    """The connection is of no use any more; says why."""


class KeyRefused(Exception):
    """The hub does not know this worker's key."""


class Line:
    """A DEALER socket with exactly one connection, which ZeroMQ does not renew by itself.

    Thus whatever is sent over it arrives in order, once, or the line is Broken.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", to: Address) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._to = to
        limit(self._socket)
        self._socket.set(zmq.RECONNECT_IVL, -1)
        self._socket.set(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
        self._socket.set(zmq.IPV6, int(to.is_ipv6))
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        self._monitor.set(zmq.LINGER, 0)

    def connect(self, keys: ClientKeys | None) -> None:
        """Begin to connect; what is sent before the connection stands waits for it."""
        if keys is not None:
            self._socket.set(zmq.CURVE_SECRETKEY, keys.secret)
            self._socket.set(zmq.CURVE_PUBLICKEY, keys.public)
            self._socket.set(zmq.CURVE_SERVERKEY, keys.hub)
        try:
            self._socket.connect(str(self._to))
        except zmq.ZMQError as error:  # such as a name that nobody knows
            raise Broken(str(error)) from error

    def send(self, piece: Piece) -> bool:
        """Send a piece; False if the line has as many as it takes for now."""
        try:
            self._socket.send_multipart((piece.frame, piece.payload), zmq.DONTWAIT)
        except zmq.Again:
            return False
        return True

    def receive(self) -> Iterator[tuple[Buffer, Buffer]]:
        """Yield what is there, header and piece, but let others have their turn.

        Raises Broken if it is something else.
        """
        for _ in range(QUEUED_PIECES):
            try:
                frames = self._socket.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            if len(frames) != 2:
                raise Broken(f"the hub sent {len(frames)} frames in place of two")
            yield frames[0].buffer, frames[1].buffer

    def wait(self, wake: Wake, timeout_s: float, *, to_send: bool) -> None:
        """Wait until there is something to receive, or room `to_send`, or somebody wakes this.

        Raises Broken if the connection has ended, KeyRefused if it was not allowed.
        """
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN | (zmq.POLLOUT if to_send else 0))
        poller.register(self._monitor, zmq.POLLIN)
        poller.register(wake.fileno(), zmq.POLLIN)
        ready = dict(poller.poll(max(0, int(timeout_s * 1000))))
        if wake.fileno() in ready:
            wake.clear()
        if self._monitor in ready:
            self._hear_of_the_connection()

    def close(self, *, politely: bool = False) -> None:
        """End it. `politely`: what was sent has 0.2 s to go."""
        with suppress(zmq.ZMQError):
            self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=_LINGER_MS if politely else 0)

    def _hear_of_the_connection(self) -> None:
        frames = self._monitor.recv_multipart(zmq.DONTWAIT)
        event, _ = _EVENT.unpack(frames[0])
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            raise KeyRefused
        if event & _FAILED:
            raise Broken("the hub does not take this worker's keys, or this one not the hub's")
        if event == zmq.EVENT_CLOSED:
            raise Broken(f"nothing answers at {self._to}")
        if event == zmq.EVENT_DISCONNECTED:
            raise Broken("the connection to the hub has ended")


def limit(socket: "zmq.Socket[bytes]") -> None:
    """Bound what a socket takes in and holds back."""
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.SNDHWM, QUEUED_PIECES)
    socket.set(zmq.RCVHWM, QUEUED_PIECES)
    socket.set(zmq.MAXMSGSIZE, PIECE_NBYTES + _CURVE_NBYTES)
    socket.set(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
