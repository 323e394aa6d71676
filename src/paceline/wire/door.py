"""Who may connect: the hub's side of ZeroMQ's authentication protocol (ZAP, RFC 27)."""

from collections.abc import Callable

import zmq
from zmq.utils import z85

_WHERE = "inproc://zeromq.zap.01"
_VERSION = b"1.0"
_KEY_NBYTES = 32
_NUM_FRAMES = 7  # version, request, domain, address, routing id, mechanism, key


class Door:
    """Asked by ZeroMQ for every connection of its context, before anything is taken from it."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        allowed: frozenset[bytes],
        complain: Callable[[str], None],
    ) -> None:
        self._allowed, self._complain = allowed, complain
        self.socket = context.socket(zmq.REP)
        self.socket.set(zmq.LINGER, 0)
        self.socket.bind(_WHERE)

    def answer(self) -> None:
        """Answer the question that is there."""
        try:
            frames = self.socket.recv_multipart(zmq.DONTWAIT)
        except zmq.Again:
            return
        request = frames[1] if len(frames) > 1 else b""
        is_allowed = self._is_allowed(frames)
        status = (b"200", b"OK") if is_allowed else (b"400", b"this key is not known")
        self.socket.send_multipart((_VERSION, request, *status, b"", b""))

    def _is_allowed(self, frames: list[bytes]) -> bool:
        if len(frames) != _NUM_FRAMES or frames[0] != _VERSION:
            self._complain(f"refused a connection with {len(frames) - 6} credentials in place of 1")
            return False
        address, mechanism, key = frames[3], frames[5], frames[6]
        if mechanism == b"CURVE" and len(key) == _KEY_NBYTES and z85.encode(key) in self._allowed:
            return True
        shown = address.decode(errors="replace")
        self._complain(f"refused a client with an unknown key from {shown}")
        return False

    def close(self) -> None:
        """Answer no more."""
        self.socket.close(linger=0)
