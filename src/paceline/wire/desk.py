"""The thread of the hub's socket: takes in what comes, at once, and sends what is to be sent."""

import time
from threading import Event, Lock

import zmq

from paceline.wire.conversation import BEAT_S
from paceline.wire.door import Door
from paceline.wire.inbox import Inbox, Request
from paceline.wire.messages import Message
from paceline.wire.router import Router
from paceline.wire.sessions import Sessions
from paceline.wire.wake import Wake

_LOOK_MS = 250
_STUCK_MS = 2  # ZeroMQ does not tell when a connection of many has room again


class Desk:
    """What the thread of the socket does; its owner's threads call all but `run`."""

    def __init__(self, router: Router, door: Door | None, sessions: Sessions, inbox: Inbox) -> None:
        self._router, self._door = router, door
        self._sessions, self._inbox = sessions, inbox
        self._lock = Lock()
        self._wake = Wake()
        self._closing = Event()
        self._beat_s = 0.0

    def run(self) -> None:
        """Serve until this is stopped; what goes wrong is told to who reads the inbox."""
        poller = zmq.Poller()
        poller.register(self._router.socket, zmq.POLLIN)
        poller.register(self._wake.fileno(), zmq.POLLIN)
        if self._door is not None:
            poller.register(self._door.socket, zmq.POLLIN)
        try:
            while not self._closing.is_set():
                poller.poll(self._turn())
                self._wake.clear()
        except Exception as error:
            self._inbox.fail(error)
            raise

    def _turn(self) -> int:
        """Do what there is to do; return for how many milliseconds there is nothing else."""
        if self._door is not None:
            self._door.answer()
        with self._lock:
            for arrival in self._router.receive():
                self._sessions.hear(arrival)
            if time.monotonic() - self._beat_s > BEAT_S:
                self._beat_s = time.monotonic()
                self._sessions.look_after_all()
            has_more, is_stuck = self._sessions.send_replies()
        if has_more:
            return 0
        return _STUCK_MS if is_stuck else _LOOK_MS

    def reply(self, request: Request, message: Message) -> None:
        """Have a reply sent. ValueError if the request has one already."""
        with self._lock:
            self._sessions.reply(request, message)
        self._wake.set()

    def drain(self, deadline_s: float) -> None:
        """Wait until all replies have arrived that can arrive, or the deadline."""
        until_s = time.monotonic() + deadline_s
        while time.monotonic() < until_s:
            with self._lock:
                if not self._sessions.has_undelivered:
                    return
            time.sleep(_STUCK_MS * 1e-3)

    def stop(self) -> None:
        """Have `run` return."""
        self._closing.set()
        self._wake.set()

    def close(self) -> None:
        """Give the descriptor back, after `run` has returned."""
        self._wake.close()
