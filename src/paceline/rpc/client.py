"""A worker's end: requests with replies, over connections that may break.

`Outbox` lies between the application's threads, which wait for replies, and the client's thread,
which has the socket.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait

import zmq

from paceline.core.errors import InvalidInput, PacelineError, WorkerLost, printable
from paceline.rpc import frames, limits
from paceline.rpc.frames import NO_NONCE, Buffer, FrameHeader, Message, MessageKind
from paceline.rpc.keys import WorkerKeys, connect_address
from paceline.rpc.sockets import Connection, Disconnected, PollableEvent, wire_nbytes

logger = logging.getLogger(__name__)

_POLL_S = 0.25  # between two looks at the deadline, if nothing arrives
_WELCOME_S = 5.0
_MIN_PAUSE_S, _MAX_PAUSE_S = 0.05, 1.0  # before another connection is made
_STABLE_S = 1.0  # a connection that lasted for so long resets the pause
_RESTARTED = "the hub was started anew, or had given this worker up: the step begins again"


class HubRestarted(PacelineError):
    """The hub does not know this worker's session any more: begin the step again.

    It was started anew, or had given the worker up. Requests without a reply will not be executed,
    unless they were before; what the hub had done of the step is gone.
    """


def _copy_of(error: PacelineError) -> PacelineError:
    """Return a copy of an error: a raised exception belongs to its thread."""
    return type(error)(*error.args)


class ReplyFuture(Future[Message]):
    """The reply to an admitted request, which may not be there yet.

    `sequence` is the request's number. `arrived_s` is when the reply came, by `time.monotonic`. Its
    result raises HubRestarted if the hub came back without knowing of this request, WorkerLost if
    it stays away for longer than the deadline, InvalidInput if it refuses this worker.
    """

    def __init__(self, sequence: int, message: Message) -> None:
        super().__init__()
        self.sequence, self.message, self.arrived_s = sequence, message, 0.0

    def wait(self, timeout_s: float) -> bool:
        """Wait for at most `timeout_s`; return True if `result` will not wait any more."""
        return bool(wait([self], timeout_s).done)


class Outbox:
    """A worker's requests in order, until their replies are there.

    `changed` guards all fields. The first `failure` ends every wait, now and later. A restart of
    the hub ends the wait for each reply; where nobody waits, the next request raises it.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.failure: PacelineError | None = None
        self.session = NO_NONCE
        self._open: dict[int, ReplyFuture] = {}  # without a reply, by ascending number
        self._unsent: deque[ReplyFuture] = deque()
        self._next = 1  # of 0 the hub says that it has no request yet
        self._max_message_nbytes = 0
        self._has_restarted = False

    @property
    def acknowledged(self) -> int:
        """Return the number up to which all requests have replies, or will have none."""
        with self.changed:
            return next(iter(self._open), self._next) - 1

    @property
    def last(self) -> int:
        """Return the number of the last admitted request."""
        with self.changed:
            return self._next - 1

    def admit(self, message: Message) -> ReplyFuture:
        """Append a request; wait while the credit or the window is used up.

        Raises InvalidInput if it is larger than the hub takes, else as `ReplyFuture.result`.
        """
        nbytes = message.nbytes
        with self.changed:
            session = self.session
            if nbytes > self._max_message_nbytes:
                raise InvalidInput(
                    "request",
                    f"a request of {nbytes:,} bytes is larger than the "
                    f"{self._max_message_nbytes:,} that the hub takes: hub and worker do not mean "
                    "the same model or batch size",
                )
            credit_nbytes = limits.CREDIT_MESSAGES * self._max_message_nbytes

            def has_room() -> bool:
                unacknowledged = self.last - self.acknowledged
                in_flight_nbytes = sum(one.message.nbytes for one in self._open.values())
                fits = in_flight_nbytes + nbytes <= credit_nbytes
                return unacknowledged < limits.WINDOW and fits

            self.changed.wait_for(lambda: self.failure or self._has_restarted or has_room())
            self.raise_failure()
            if self._has_restarted or self.session != session:
                self._has_restarted = False
                raise HubRestarted(_RESTARTED)
            future = ReplyFuture(self._next, message)
            self._next += 1
            self._open[future.sequence] = future
            self._unsent.append(future)
            return future

    def take(self) -> ReplyFuture | None:
        """Return the next request to send; None if there is none."""
        with self.changed:
            return self._unsent.popleft() if self._unsent else None

    def join(self, session: bytes, max_message_nbytes: int, last_request: int) -> bool:
        """Begin or resume a session, whose hub has all requests up to `last_request`.

        Returns False if it replaces another session: then every open request is void.
        """
        with self.changed:
            before, self.session = self.session, session
            self._max_message_nbytes = max_message_nbytes
            is_known = before in (NO_NONCE, session)
            if is_known:
                self._unsent = deque(
                    one for one in self._open.values() if one.sequence > last_request
                )
            else:
                # A worker between two requests of a step waits for nothing: its next one raises.
                self._has_restarted = not self._open
                self._end(HubRestarted(_RESTARTED))
            self.changed.notify_all()
            return is_known

    def answer(self, sequence: int, reply: Message) -> bool:
        """Store a reply; return False if it came before, over another connection."""
        with self.changed:
            future = self._open.pop(sequence, None)
            if future is None:
                return False
            future.arrived_s = time.monotonic()
            future.set_result(reply)
            self.changed.notify_all()
            return True

    def fail(self, error: PacelineError) -> None:
        """Make every wait, now and later, raise this error; the first failure stays."""
        with self.changed:
            self.failure = self.failure or error
            self._end(self.failure)
            self.changed.notify_all()

    def raise_failure(self) -> None:
        """Raise the failure, if there is one."""
        if self.failure is not None:
            raise _copy_of(self.failure)

    def _end(self, error: PacelineError) -> None:
        """End the wait for each reply."""
        for future in self._open.values():
            future.set_exception(_copy_of(error))
        self._open.clear()
        self._unsent.clear()


class Client:
    """A worker's connection to the hub, which is made again whenever it breaks.

    The hub may be away for `deadline_s`. `settings` are what the hub sends to every worker.
    `sent_nbytes` and `received_nbytes` have headers; what is sent again counts again. Raises
    InvalidInput if the hub refuses this worker, with the reason; WorkerLost if no hub accepts it
    within the deadline.
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
        self._run_id, self._worker, self._nonce = run_id, worker, limits.nonce_of(run_id)
        self._keys, self._deadline_s, self._clock = keys, deadline_s, clock
        self.settings = b""
        self.sent_nbytes = self.received_nbytes = 0
        self._outbox = outbox = Outbox()
        self._sent_s = self._heard_s = self._clock()  # to and from the hub, at last
        self._wakeup = PollableEvent()
        self._closing = threading.Event()
        self._trouble = ""  # why the last connection broke
        self._thread = threading.Thread(target=self._run, name="paceline-rpc", daemon=True)
        self._thread.start()
        try:
            with outbox.changed:
                outbox.changed.wait_for(lambda: outbox.failure or outbox.session != NO_NONCE)
                outbox.raise_failure()
        except BaseException:  # also an interrupt: the thread and its socket must end
            self.close()
            raise

    def request(self, message: Message) -> ReplyFuture:
        """Send a request, as soon as this worker's credit allows it.

        Raises InvalidInput if it is larger than the hub takes, HubRestarted if the hub was started
        anew since the last request, WorkerLost if it stays away for longer than the deadline.
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
        """Connect to the hub again and again, until this is closed or the deadline has passed."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        pause_s = _MIN_PAUSE_S
        try:
            while not self._closing.is_set():
                began_s = self._clock()
                self._use(Connection(context, self._address))
                is_stable = self._clock() - began_s > _STABLE_S
                pause_s = _MIN_PAUSE_S if is_stable else min(2 * pause_s, _MAX_PAUSE_S)
                self._closing.wait(pause_s)
                if self._clock() - self._heard_s >= self._deadline_s:
                    what = f"nothing was heard of the hub at {self._address}"
                    if self._outbox.session == NO_NONCE:
                        what = f"no hub at {self._address} has taken worker {self._worker} in"
                    why = f": {self._trouble}" if self._trouble else ""
                    raise WorkerLost(f"{what} within {self._deadline_s:g} s{why}")
        except PacelineError as error:
            self._outbox.fail(error)
        except Exception as error:  # threads that wait for replies must not wait for ever
            self._outbox.fail(WorkerLost(f"the connection to the hub failed: {error!r}"))
            raise
        finally:
            context.term()

    def _use(self, connection: Connection) -> None:
        """Exchange messages over a connection until it breaks, or this is closed."""
        try:
            connection.connect(self._keys)
            self._join(connection)
            self._exchange(connection)
        except (Disconnected, frames.ProtocolError) as error:
            trouble = printable(str(error), limits.MOST_TEXT)
            if trouble != self._trouble and not self._closing.is_set():
                self._trouble = trouble
                logger.warning("worker %d: %s; connecting again", self._worker, trouble)
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
        """Begin or resume the session if this is a WELCOME; raise if it is a refusal."""
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
            raise InvalidInput("hub", f"refuses this worker: {text}")
        if kind != MessageKind.WELCOME:
            return False
        self._heard_s = self._clock()
        self.received_nbytes += wire_nbytes(payload)
        session, max_nbytes, settings = frames.single_parts(header, payload, 3)
        self.settings = settings  # before `join`, which lets the constructor return
        most = int.from_bytes(max_nbytes, "little")
        if not self._outbox.join(session, most, header.sequence):
            logger.warning("worker %d: the hub has begun anew", self._worker)
        elif self._trouble:
            logger.info("worker %d: connected to the hub again", self._worker)
        self._trouble = ""
        return True

    def _exchange(self, connection: Connection) -> None:
        """Send requests and receive replies until this is closed.

        Raises Disconnected or ProtocolError if another connection is to be made.
        """
        assembly, outgoing = frames.Assembly(), frames.PieceQueue(self._next_request)
        while not self._closing.is_set():
            is_blocked = not self._send_requests(connection, outgoing)
            self._poll(connection, _POLL_S, to_send=is_blocked)
            for frame, payload in connection.receive():
                header = frames.unpack(frame, payload)
                self._heard_s = self._clock()
                self.received_nbytes += wire_nbytes(payload)
                if header.kind is MessageKind.RESET:
                    raise Disconnected("the hub asks to connect anew")
                if header.kind is MessageKind.REPLY:
                    reply = assembly.add(header, payload)
                    if reply is not None:
                        self._outbox.answer(header.sequence, reply)
            if self._clock() - self._heard_s > min(limits.SILENCE_S, self._deadline_s):
                raise Disconnected("the hub is silent")
        self._send_control(connection, MessageKind.BYE)

    def _poll(self, connection: Connection, timeout_s: float, *, to_send: bool) -> None:
        """Wait for messages. A process that was stopped meanwhile has not waited for the hub."""
        polled_s = self._clock()
        connection.poll(self._wakeup, timeout_s, to_send=to_send)
        self._heard_s += max(0.0, self._clock() - polled_s - timeout_s)

    def _send_requests(self, connection: Connection, outgoing: frames.PieceQueue) -> bool:
        """Send until nothing is left, or the queue is full: then return False."""
        while True:
            # Here, between two pieces, so that a large request does not delay it.
            if self._clock() - self._sent_s > limits.HEARTBEAT_S:
                self._send_control(connection, MessageKind.HEARTBEAT)
            piece = outgoing.peek()
            if piece is None:
                return True
            if not self._send(connection, piece):
                return False
            outgoing.advance()

    def _next_request(self) -> tuple[FrameHeader, Message] | None:
        if (future := self._outbox.take()) is None:
            return None
        return self._header(MessageKind.REQUEST, future.sequence), future.message

    def _send_control(
        self, connection: Connection, kind: MessageKind, message: Message = frames.NO_CONTENT
    ) -> None:
        """Send a message of one piece that is no request, unless the queue is full."""
        header = self._header(kind, self._outbox.last)
        self._send(connection, next(frames.split(header, message)))

    def _header(self, kind: MessageKind, sequence: int) -> FrameHeader:
        acknowledged = self._outbox.acknowledged
        return FrameHeader(kind, self._nonce, self._worker, sequence, acknowledged)

    def _send(self, connection: Connection, piece: frames.MessagePiece) -> bool:
        if not connection.send(piece):
            return False
        self._sent_s = self._clock()
        self.sent_nbytes += wire_nbytes(piece.payload)
        return True
