"""What a service has for its owner: requests, and workers that come and go."""

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TypeAlias

from paceline.wire.messages import Message


@dataclass(frozen=True)
class Request:
    """A request of a worker, to be executed and replied to. No other has its session and number.

    `arrived_s` is when all of it was there, by `time.monotonic`.
    """

    worker: int
    message: Message
    session: bytes
    sequence: int
    arrived_s: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Joined:
    """A worker is there. Nothing that it did before counts."""

    worker: int


@dataclass(frozen=True)
class Lost:
    """A worker is gone, and what it had asked is void; it may join again.

    `why` goes on from "worker 3". `has_left` is whether it said good-bye.
    """

    worker: int
    why: str
    has_left: bool = False


@dataclass(frozen=True)
class Woken:
    """The owner of the service has woken itself: there is something beside requests to see to."""


Event: TypeAlias = Request | Joined | Lost | Woken


class Inbox:
    """Events in their order, between two threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._events: deque[Event] = deque()
        self._failure: Exception | None = None
        self._is_closed = False

    def put(self, event: Event) -> None:
        """Add an event."""
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()

    def drop(self, session: bytes) -> None:
        """Take back the requests of a session that nobody has taken yet."""
        with self._changed:
            kept = [
                event
                for event in self._events
                if not (isinstance(event, Request) and event.session == session)
            ]
            self._events = deque(kept)

    def get(self, timeout_s: float) -> Event | None:
        """Return the next event; None if there is none for that long, or this is closed."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._events or self._failure or self._is_closed, timeout_s
            )
            if self._failure is not None:
                raise RuntimeError("the service has failed") from self._failure
            return self._events.popleft() if self._events else None

    def fail(self, error: Exception) -> None:
        """Have whoever comes know that there will be no more."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def close(self) -> None:
        """Let nobody wait any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
