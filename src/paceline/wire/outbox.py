"""The worker's side of the book: requests in their order, until their replies are there."""

import threading
import time
from collections import deque

from paceline.core.errors import InvalidInput, PacelineError
from paceline.wire.frames import NO_NONCE
from paceline.wire.ledger import WINDOW, credit_of
from paceline.wire.messages import Message


class HubRestarted(PacelineError):
    """The hub does not know this worker's session any more: begin the step again.

    It was started anew, or had given the worker up. No request without a reply will be executed,
    unless it was before; what was half done at the hub is gone.
    """


class Pending:
    """A request that was admitted. `sequence` is its number.

    `arrived_s` is when its reply was there, by `time.monotonic`.
    """

    def __init__(self, outbox: "Outbox", sequence: int, message: Message) -> None:
        self._outbox = outbox
        self.sequence = sequence
        self.message = message
        self.nbytes = message.nbytes
        self.reply: Message | None = None
        self.is_void = False
        self.arrived_s = 0.0

    def wait(self, timeout_s: float) -> bool:
        """Wait for at most so long; return whether `result` has no need to wait any more."""
        return self._outbox.wait_a_while(self, timeout_s)

    def result(self) -> Message:
        """Wait for the reply and return it, as often as one likes.

        Raises HubRestarted if the hub came back without knowing of this request, WorkerLost if it
        stays away for longer than the deadline, InvalidInput if it refuses this worker.
        """
        return self._outbox.wait(self)


class Outbox:
    """What a worker's threads and the thread of its connection share."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open: dict[int, Pending] = {}  # without a reply, in their order
        self._unsent: deque[Pending] = deque()
        self._next = 1
        self._in_flight = 0
        self._largest = 0
        self._has_begun_anew = False
        self._failure: PacelineError | None = None
        self.session = NO_NONCE

    @property
    def arrived(self) -> int:
        """The number up to which all requests have their replies, or will have none."""
        with self._changed:
            return self._arrived()

    @property
    def last(self) -> int:
        """The number of the last request that was admitted."""
        with self._changed:
            return self._next - 1

    def wait_until_joined(self) -> None:
        """Wait for the first welcome. Raises why there is none."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure or self.session != NO_NONCE)
            self._raise_failure()

    def admit(self, message: Message) -> Pending:
        """Take a request in; wait as long as the credit, or the window, is used up.

        Raises as `Pending.result`.
        """
        nbytes = message.nbytes
        with self._changed:
            if nbytes > self._largest:
                raise InvalidInput(
                    f"a request of {nbytes:,} bytes is larger than the {self._largest:,} that the "
                    "hub takes: hub and worker do not mean the same model or batch size"
                )
            self._changed.wait_for(lambda: self._is_over or self._has_room(nbytes))
            self._raise_if_over()
            pending = Pending(self, self._next, message)
            self._next += 1
            self._in_flight += nbytes
            self._open[pending.sequence] = pending
            self._unsent.append(pending)
            return pending

    def wait(self, pending: Pending) -> Message:
        """Wait for the reply to a request. Raises as `Pending.result`."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure or pending.is_void or pending.reply)
            if pending.reply is not None:
                return pending.reply
            self._raise_failure()
            self._has_begun_anew = False
            raise _restarted()

    def wait_a_while(self, pending: Pending, timeout_s: float) -> bool:
        """Return whether there is a reply to a request, or never will be, after at most so long."""
        with self._changed:
            return bool(
                self._changed.wait_for(
                    lambda: self._failure or pending.is_void or pending.reply, timeout_s
                )
            )

    def take(self) -> Pending | None:
        """Return the next request to send, if there is one."""
        with self._changed:
            return self._unsent.popleft() if self._unsent else None

    def join(self, session: bytes, largest_nbytes: int, highest: int) -> bool:
        """Go on in a session, whose hub has all requests up to `highest`.

        Returns False if it is another one than before: then every open request is void.
        """
        with self._changed:
            is_first, is_same = self.session == NO_NONCE, self.session == session
            self.session, self._largest = session, largest_nbytes
            if is_same:
                self._unsent = deque(one for one in self._open.values() if one.sequence > highest)
            elif not is_first:
                self._begin_anew()
            self._changed.notify_all()
            return is_first or is_same

    def answer(self, sequence: int, reply: Message) -> bool:
        """Note a reply; return whether it was waited for."""
        with self._changed:
            pending = self._open.pop(sequence, None)
            if pending is None:
                return False
            pending.reply, pending.arrived_s = reply, time.monotonic()
            self._in_flight -= pending.nbytes
            self._changed.notify_all()
            return True

    def fail(self, error: PacelineError) -> None:
        """Let everyone who waits, or comes later, have this error."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _begin_anew(self) -> None:
        for pending in self._open.values():
            pending.is_void = True
        self._open.clear()
        self._unsent.clear()
        self._in_flight = 0
        self._has_begun_anew = True  # also one who waits for nothing now must hear of it

    def _arrived(self) -> int:
        return next(iter(self._open), self._next) - 1

    @property
    def _is_over(self) -> bool:
        return self._has_begun_anew or self._failure is not None

    def _has_room(self, nbytes: int) -> bool:
        in_window = self._next - 1 - self._arrived() < WINDOW
        return in_window and self._in_flight + nbytes <= credit_of(self._largest)

    def _raise_if_over(self) -> None:
        self._raise_failure()
        if self._has_begun_anew:
            self._has_begun_anew = False
            raise _restarted()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise type(self._failure)(*self._failure.args)


def _restarted() -> HubRestarted:
    return HubRestarted(
        "the hub was started anew, or had given this worker up: the step begins again"
    )
