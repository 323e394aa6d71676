"""Connect a worker to the hub, and reconnect after a lost connection.

The application's threads put requests into `Outbox`. A separate thread, which owns the socket,
sends these requests and receives the replies.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial

import zmq

from paceline.core.errors import InvalidInput, PacelineError, WorkerLost, printable
from paceline.rpc import frames, limits
from paceline.rpc.frames import NO_SESSION, Buffer, FrameHeader, Message, MessageKind
from paceline.rpc.keys import WorkerKeys, connect_address
from paceline.rpc.sockets import Connection, Disconnected, PollableEvent, wire_nbytes

logger = logging.getLogger(__name__)

_POLL_S = 0.25  # longest wait for a message between two checks of the deadline
_WELCOME_S = 5.0
_PAUSE_S = 0.2  # pause before the next connection
_RESTARTED = "the hub was restarted or has dropped this worker; the worker repeats its step"


class HubRestarted(PacelineError):
    """Raised if the hub has lost this worker's session; the worker must repeat its training step.

    The hub may have executed requests that got no reply.
    """


def _copy_of(error: PacelineError) -> PacelineError:
    # Every thread raises a separate copy, because raising adds a traceback to the exception.
    return type(error)(*error.args)


class ReplyFuture(Future[Message]):
    """The reply to a request; `arrived_s`: when the reply arrived, by `time.monotonic`.

    `result` raises HubRestarted if the hub has lost the request, InvalidInput if the hub refuses
    this worker, and WorkerLost if the hub is unreachable until the deadline.
    """

    def __init__(self, sequence: int, message: Message) -> None:
        super().__init__()
        self.sequence, self.message, self.arrived_s = sequence, message, 0.0

    def wait(self, timeout_s: float) -> bool:
        """Wait for at most `timeout_s`; return whether there is a reply or an error."""
        return bool(wait([self], timeout_s).done)


class Outbox:
    """A queue of a worker's requests, which keeps each request until its reply arrives.

    `changed`: the condition variable that guards all fields.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.failure: PacelineError | None = None
        self.session = NO_SESSION
        self._open: dict[int, ReplyFuture] = {}  # requests without a reply, by ascending number
        self._sent = 0  # the number of the last request that was sent over this connection
        self._next = 1  # the next request's number; a hub that has received none reports 0
        self._max_message_nbytes = 0

    @property
    def acknowledged(self) -> int:
        """The largest n such that requests 1 to n all have replies."""
        with self.changed:
            return next(iter(self._open), self._next) - 1

    @property
    def last(self) -> int:
        """The number of the last admitted request."""
        with self.changed:
            return self._next - 1

    def admit(self, message: Message) -> ReplyFuture:
        """Append a request, once the limits on unanswered requests allow another request.

        Raises InvalidInput if the request is too large.
        """
        nbytes = message.nbytes
        with self.changed:

            def has_room() -> bool:
                unacknowledged = self.last - self.acknowledged
                in_flight_nbytes = sum(one.message.nbytes for one in self._open.values())
                credit_nbytes = limits.CREDIT_MESSAGES * self._max_message_nbytes
                fits = in_flight_nbytes + nbytes <= credit_nbytes
                return unacknowledged < limits.WINDOW and fits

            def is_too_large() -> bool:  # a hub that restarts meanwhile may have another limit
                return nbytes > self._max_message_nbytes

            self.changed.wait_for(lambda: self.failure or is_too_large() or has_room())
            if self.failure is not None:
                raise _copy_of(self.failure)
            if is_too_large():
                problem = f"must be at most {self._max_message_nbytes:,} bytes, the hub's limit"
                hint = "hub and worker must have the same model and batch size"
                raise InvalidInput("request", problem, got=nbytes, hint=hint)
            future = ReplyFuture(self._next, message)
            self._next += 1
            self._open[future.sequence] = future
            return future

    def take(self) -> ReplyFuture | None:
        """Return the next request to send over the current connection; None without requests."""
        with self.changed:
            for sequence, future in self._open.items():
                if sequence > self._sent:
                    self._sent = sequence
                    return future
            return None

    def join(self, session: bytes, max_message_nbytes: int, last_request: int) -> bool:
        """Begin or resume a session; requests after `last_request` will be sent (again).

        Returns False if `session` replaces another session. Then all requests without a reply raise
        HubRestarted.
        """
        with self.changed:
            before, self.session = self.session, session
            self._max_message_nbytes = max_message_nbytes
            self._sent = last_request
            is_known = before in (NO_SESSION, session)
            if not is_known:
                self._end(HubRestarted(_RESTARTED))
            self.changed.notify_all()
            return is_known

    def answer(self, sequence: int, reply: Message) -> None:
        """Store a reply, unless an earlier connection has already delivered it."""
        with self.changed:
            future = self._open.pop(sequence, None)
            if future is not None:
                future.arrived_s = time.monotonic()
                future.set_result(reply)
                self.changed.notify_all()

    def fail(self, error: PacelineError) -> None:
        """Make all pending and later requests raise `error`; only the first call's error counts."""
        with self.changed:
            self.failure = self.failure or error
            self._end(self.failure)
            self.changed.notify_all()

    def _end(self, error: PacelineError) -> None:
        """Make all requests without a reply raise `error`."""
        for future in self._open.values():
            future.set_exception(_copy_of(error))
        self._open.clear()


class Client:
    """Exchanges a worker's messages with the hub, and reconnects after a lost connection.

    `deadline_s`: the longest time without a message from the hub. `settings`: the bytes that the
    hub sends to each worker that joins. Raises InvalidInput if the hub refuses this worker, and
    WorkerLost if no hub accepts this worker within `deadline_s`.
    """

    def __init__(
        self,
        address: str,
        run_id: str,
        worker: int,
        *,
        keys: WorkerKeys | None,
        deadline_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._address = connect_address(address, has_keys=keys is not None)
        limits.check_run_name(run_id)
        self._run_id, self._worker = run_id, worker
        self._keys, self._deadline_s, self._clock = keys, deadline_s, clock
        self.settings = b""
        self.sent_nbytes = self.received_nbytes = 0
        self._outbox = outbox = Outbox()
        # The times of the last message to the hub, and of the last message from the hub.
        self._sent_s = self._heard_s = self._clock()
        self._wakeup = PollableEvent()
        self._closing = threading.Event()
        self._trouble = ""  # the reason why the last connection broke
        self._thread = threading.Thread(target=self._run, name="paceline-rpc", daemon=True)
        self._thread.start()
        try:
            with outbox.changed:
                outbox.changed.wait_for(lambda: outbox.failure or outbox.session != NO_SESSION)
            if outbox.failure is not None:
                raise _copy_of(outbox.failure)
        except BaseException:  # the thread and its socket must also end after an interrupt
            self.close()
            raise

    def request(self, message: Message) -> ReplyFuture:
        """Send a request, once the limits on unanswered requests allow another request.

        Raises the errors of `ReplyFuture.result`, and InvalidInput if the request is too large.
        """
        future = self._outbox.admit(message)
        self._wakeup.set()
        return future

    def close(self) -> None:
        """Send BYE and disconnect. Requests without a reply raise WorkerLost."""
        self._outbox.fail(WorkerLost("the connection to the hub was closed"))
        self._closing.set()
        self._wakeup.set()
        self._thread.join()
        self._wakeup.close()

    def _run(self) -> None:
        """Connect to the hub; reconnect after lost connections, until `close` or the deadline."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            while not self._closing.is_set():
                self._use(Connection(context, self._address))
                self._closing.wait(_PAUSE_S)
                if self._clock() - self._heard_s >= self._deadline_s:
                    what = f"no message from the hub at {self._address}"
                    if self._outbox.session == NO_SESSION:
                        what = f"no hub at {self._address} has accepted worker {self._worker}"
                    why = f": {self._trouble}" if self._trouble else ""
                    raise WorkerLost(f"{what} within {self._deadline_s:g} s{why}")
        except PacelineError as error:
            self._outbox.fail(error)
        except Exception as error:  # threads that wait for replies must not wait forever
            self._outbox.fail(WorkerLost(f"the connection to the hub failed: {error!r}"))
            raise
        finally:
            context.term()

    def _use(self, connection: Connection) -> None:
        """Exchange messages over a connection until it breaks or `close` is called."""
        try:
            connection.connect(self._keys)
            self._join(connection)
            self._exchange(connection)
        except (Disconnected, frames.ProtocolError) as error:
            trouble = printable(str(error), limits.MOST_TEXT)
            if trouble != self._trouble and not self._closing.is_set():
                self._trouble = trouble
                logger.warning("worker %d: %s; reconnecting", self._worker, trouble)
        finally:
            connection.close(flush=self._closing.is_set())

    def _join(self, connection: Connection) -> None:
        run_id, release = self._run_id.encode(), limits.RELEASE.encode()
        hello = Message("", parts=(run_id, release, self._outbox.session))
        self._send_control(connection, MessageKind.HELLO, hello)
        until_s = min(self._clock() + _WELCOME_S, self._heard_s + self._deadline_s)
        while not self._closing.is_set():
            for frame, payload in connection.receive():
                if self._is_welcome(frame, payload):
                    return
            left_s = until_s - self._clock()
            if left_s <= 0:
                raise Disconnected("the hub does not answer")
            self._poll(connection, min(left_s, _POLL_S), to_send=False)

    def _is_welcome(self, frame: Buffer, payload: Buffer) -> bool:
        """Return whether a message is a WELCOME, and if so, begin or resume the session.

        Raises Disconnected for BUSY, and InvalidInput for REFUSED.
        """
        try:
            header = frames.unpack(frame, payload)
            kind = int(header.kind)
        except frames.VersionMismatch as mismatch:
            if mismatch.kind != MessageKind.REFUSED:
                raise
            kind = mismatch.kind
        if kind in (MessageKind.REFUSED, MessageKind.BUSY):
            text = printable(bytes(payload).decode(errors="replace"), limits.MOST_TEXT)
            if kind == MessageKind.BUSY:
                raise Disconnected(text)
            raise InvalidInput("hub", f"has refused this worker: {text}")
        if kind != MessageKind.WELCOME:
            return False
        self._heard_s = self._clock()
        self.received_nbytes += wire_nbytes(payload)
        session, max_nbytes, settings = frames.single_parts(header, payload, 3)
        self.settings = settings  # set before `join`, after which the constructor returns
        most = int.from_bytes(max_nbytes, "little")
        if not self._outbox.join(session, most, header.sequence):
            logger.warning("worker %d: the hub was restarted", self._worker)
        elif self._trouble:
            logger.info("worker %d: reconnected to the hub", self._worker)
        self._trouble = ""
        return True

    def _exchange(self, connection: Connection) -> None:
        """Send requests and receive replies until `close`, or until the connection breaks."""
        assembly, outgoing = frames.Assembly(), frames.PieceQueue(self._next_request)
        while not self._closing.is_set():
            is_blocked = not self._send_requests(connection, outgoing)
            self._poll(connection, _POLL_S, to_send=is_blocked)
            for frame, payload in connection.receive():
                header = frames.unpack(frame, payload)
                self._heard_s = self._clock()
                self.received_nbytes += wire_nbytes(payload)
                if header.kind is MessageKind.RESET:
                    raise Disconnected("the hub has reset the connection")
                if header.kind is MessageKind.REPLY:
                    reply = assembly.add(header, payload)
                    if reply is not None:
                        self._outbox.answer(header.sequence, reply)
            if self._clock() - self._heard_s > min(limits.SILENCE_S, self._deadline_s):
                raise Disconnected("the hub is silent")
        self._send_control(connection, MessageKind.BYE)

    def _poll(self, connection: Connection, timeout_s: float, *, to_send: bool) -> None:
        polled_s = self._clock()
        connection.poll(self._wakeup, timeout_s, to_send=to_send)
        # Time during which this process was suspended must not count as silence of the hub.
        self._heard_s += max(0.0, self._clock() - polled_s - timeout_s)

    def _send_requests(self, connection: Connection, outgoing: frames.PieceQueue) -> bool:
        """Send all waiting requests; return False if the connection's queue is full."""
        while True:
            # Send a due heartbeat before each piece, so that no large request delays heartbeats.
            if self._clock() - self._sent_s > limits.HEARTBEAT_S:
                self._send_control(connection, MessageKind.HEARTBEAT)
            is_sent = outgoing.send(partial(self._send, connection))
            if not is_sent:
                return is_sent is None

    def _next_request(self) -> tuple[FrameHeader, Message] | None:
        if (future := self._outbox.take()) is None:
            return None
        return self._header(MessageKind.REQUEST, future.sequence), future.message

    def _send_control(
        self, connection: Connection, kind: MessageKind, message: Message = frames.NO_CONTENT
    ) -> None:
        """Send a one-piece message that is no request; drop the message if the queue is full."""
        header = self._header(kind, self._outbox.last)
        self._send(connection, next(frames.split(header, message)))

    def _header(self, kind: MessageKind, sequence: int) -> FrameHeader:
        return FrameHeader(kind, self._worker, sequence, self._outbox.acknowledged)

    def _send(self, connection: Connection, piece: frames.MessagePiece) -> bool:
        if not connection.send(piece):
            return False
        self._sent_s = self._clock()
        self.sent_nbytes += wire_nbytes(piece.payload)
        return True
