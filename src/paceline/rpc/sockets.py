"""Configure ZeroMQ sockets for workers (`Connection`) and the hub (`Router`)."""

import errno
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

import zmq
from zmq.utils.monitor import parse_monitor_message

from paceline.core.errors import InvalidInput
from paceline.rpc.frames import HEADER_NBYTES, PIECE_NBYTES, Buffer, MessagePiece
from paceline.rpc.keys import Context, HubKeys, WorkerKeys
from paceline.rpc.limits import QUEUED_PIECES

_HANDSHAKE_MS = 5000  # ZeroMQ closes a connection whose handshake takes longer
_CONNECT_MS = 5000
_LINGER_MS = 200  # time to send BYE on closing; without BYE, the hub waits for a reconnection
_CURVE_NBYTES = 64  # upper bound of CURVE's overhead, which counts as part of a frame

_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_EVENTS = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | _FAILED

_ZMTP_NBYTES = 2 + 9  # ZMTP's overhead: 2 bytes for a header, at most 9 for a piece


def _new_socket(context: Context, kind: int, address: str) -> "zmq.Socket[bytes]":
    """Create a socket with bounded queues, frames and handshakes."""
    socket = context.socket(kind)
    socket.set(zmq.LINGER, 0)
    socket.set_hwm(QUEUED_PIECES)
    socket.set(zmq.MAXMSGSIZE, PIECE_NBYTES + _CURVE_NBYTES)
    socket.set(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    socket.set(zmq.IPV6, int("[" in address))
    return socket


class PollableEvent:
    """An event that any thread sets, and one thread polls together with sockets."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Return the descriptor to poll for reading."""
        return self._fd

    def set(self) -> None:
        """Wake the thread that polls; does nothing after `close`."""
        if self._fd >= 0:
            os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Reset the event, so that polling waits again."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def close(self) -> None:
        """Close the descriptor; a second call does nothing."""
        descriptor, self._fd = self._fd, -1
        if descriptor >= 0:
            os.close(descriptor)


class Disconnected(Exception):
    """Raised if a connection is unusable; the worker may reconnect."""


class Connection:
    """A worker's DEALER socket with one connection, without ZeroMQ's automatic reconnection.

    All messages arrive once and in order, or a method raises Disconnected.
    """

    def __init__(self, context: Context, to: str) -> None:
        self._to = to
        self._socket = _new_socket(context, zmq.DEALER, to)
        # Disable ZeroMQ's reconnection, which would continue in the middle of a message.
        self._socket.set(zmq.RECONNECT_IVL, -1)
        self._socket.set(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        self._monitor.set(zmq.LINGER, 0)

    def connect(self, keys: WorkerKeys | None) -> None:
        """Begin to connect; raises Disconnected if the address cannot be resolved."""
        if keys is not None:
            self._socket.set(zmq.CURVE_SECRETKEY, keys.secret)
            self._socket.set(zmq.CURVE_PUBLICKEY, keys.public)
            self._socket.set(zmq.CURVE_SERVERKEY, keys.hub)
        try:
            self._socket.connect(self._to)
        except zmq.ZMQError as error:
            raise Disconnected(str(error)) from error

    def send(self, piece: MessagePiece) -> bool:
        """Send a piece; return False if the connection's queue is full."""
        try:
            self._socket.send_multipart(piece, zmq.DONTWAIT)
        except zmq.Again:
            return False
        return True

    def receive(self) -> Iterator[tuple[Buffer, Buffer]]:
        """Yield the header and the payload of each piece that has arrived."""
        for _ in range(QUEUED_PIECES):  # bounded, so that the caller can send in between
            try:
                frames = self._socket.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            if len(frames) != 2:
                raise Disconnected(f"the hub sent {len(frames)} frames instead of 2")
            yield frames[0].buffer, frames[1].buffer

    def poll(self, wakeup: PollableEvent, timeout_s: float, *, to_send: bool) -> None:
        """Wait for a message or `wakeup`, and with `to_send` also for room in the send queue.

        Raises Disconnected if the connection has ended, and InvalidInput for a refused key.
        """
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN | (zmq.POLLOUT if to_send else 0))
        poller.register(self._monitor, zmq.POLLIN)
        poller.register(wakeup.fileno(), zmq.POLLIN)
        ready = dict(poller.poll(max(0, int(timeout_s * 1000))))
        wakeup.clear()
        if self._monitor not in ready:
            return
        event = parse_monitor_message(self._monitor.recv_multipart(zmq.DONTWAIT))["event"]
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            hint = "copy its worker.pub into the hub's folder of keys"
            raise InvalidInput("keys", "must have a worker.key that the hub knows", hint=hint)
        if event & _FAILED:
            raise Disconnected("hub and worker do not accept each other's keys")
        if event == zmq.EVENT_CLOSED:
            raise Disconnected(f"no hub is listening at {self._to}")
        if event == zmq.EVENT_DISCONNECTED:
            raise Disconnected("the connection to the hub has ended")

    def close(self, *, flush: bool = False) -> None:
        """Close the connection; with `flush`, send the queued pieces first, within 0.2 s."""
        with suppress(zmq.ZMQError):
            self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=_LINGER_MS if flush else 0)


class Arrival(NamedTuple):
    """A message from the address `sender`, over the connection `route`."""

    route: bytes
    sender: str
    frames: tuple[Buffer, ...]


class Router:
    """The hub's ROUTER socket with a bounded queue per connection."""

    def __init__(self, context: Context, at: str, keys: HubKeys | None) -> None:
        self.socket = _new_socket(context, zmq.ROUTER, at)
        # By default a ROUTER silently drops messages to a full queue or a closed connection.
        self.socket.set(zmq.ROUTER_MANDATORY, 1)
        if keys is not None:
            self.socket.set(zmq.CURVE_SECRETKEY, keys.secret)
            self.socket.set(zmq.CURVE_SERVER, 1)
        try:
            self.socket.bind(at)
        except zmq.ZMQError as error:
            in_use = error.errno == errno.EADDRINUSE
            why = "is in use" if in_use else f"cannot be bound: {error.strerror}"
            raise InvalidInput("listen", why, got=at) from error
        self.address = self.socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def receive(self) -> Iterator[Arrival]:
        """Yield the messages that have arrived."""
        for _ in range(4 * QUEUED_PIECES):  # bounded, so that the caller can send in between
            try:
                route, *frames = self.socket.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            try:
                sender = str((frames or [route])[-1].get("Peer-Address"))
            except zmq.ZMQError:
                sender = "an unknown address"
            yield Arrival(route.bytes, sender, tuple(frame.buffer for frame in frames))

    def send(self, route: bytes, piece: MessagePiece) -> bool:
        """Send a piece; return False if the connection's queue is full, or raise Disconnected."""
        try:
            self.socket.send_multipart((route, *piece), zmq.DONTWAIT)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                raise Disconnected("the worker has closed the connection") from error
            raise
        return True


def wire_nbytes(payload: Buffer) -> int:
    """Count the bytes of a piece and its headers, without CURVE and TCP overhead."""
    return memoryview(payload).nbytes + HEADER_NBYTES + _ZMTP_NBYTES
