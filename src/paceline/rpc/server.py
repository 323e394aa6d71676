"""Serve all workers at one address, and queue their requests for the hub.

The server drops messages from clients without a session. After a protocol error, the server resets
the connection and drops the incomplete message. The worker reconnects and resumes its session.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import zmq

from paceline.core.errors import InvalidInput
from paceline.rpc import frames, limits
from paceline.rpc.frames import Buffer, FrameHeader, Message, MessageKind, ProtocolError
from paceline.rpc.keys import Authenticator, HubKeys, bind_address
from paceline.rpc.limits import Limits, RateLimitedLog
from paceline.rpc.session import WorkerSession
from paceline.rpc.sockets import Arrival, Disconnected, PollableEvent, Router, wire_nbytes

logger = logging.getLogger(__name__)

_DRAIN_S = 2.0
_POLL_MS = 250
_BLOCKED_MS = 2  # short wait if a queue is full: ZeroMQ does not report when it has room
_PIECES_PER_WORKER = limits.QUEUED_PIECES // 2  # maximum pieces before the next worker's turn


@dataclass(frozen=True)
class RpcRequest:
    """A worker's request, to be answered once; `arrived_s`: its arrival, by `time.monotonic`."""

    worker: int
    message: Message
    session: bytes
    sequence: int
    arrived_s: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Joined:
    """Reports a new session of a worker; requests of its earlier sessions are void."""

    worker: int


@dataclass(frozen=True)
class Lost:
    """Reports a lost worker, whose open requests are void; `why`: for example "has left"."""

    worker: int
    why: str


Event: TypeAlias = RpcRequest | Joined | Lost


class Server:
    """Accepts the workers of a run, and queues their requests for `receive`.

    `address`: one address, such as tcp://10.0.0.1:5555; port 0 means any free port. Without `keys`,
    the address must be a loopback address. A separate thread owns the socket, so that slow requests
    do not delay heartbeats. `refusals` logs and counts refused clients and dropped messages. Raises
    InvalidInput if the address cannot be bound.
    """

    def __init__(
        self,
        address: str,
        limits: Limits,
        *,
        keys: HubKeys | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        bound = bind_address(address, has_keys=keys is not None)
        self._limits, self._clock = limits, clock
        self.refusals = RateLimitedLog(logger, clock)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # Create the authenticator before the router: without an authenticator, ZeroMQ admits
        # everybody who knows the hub's public key.
        self._authenticator = (
            Authenticator(self._context, keys.workers, self.refusals.warning) if keys else None
        )
        try:
            self._router = Router(self._context, bound, keys)
        except InvalidInput:
            self._context.destroy(linger=0)
            raise
        self.address = self._router.address
        self.sent_nbytes = self.received_nbytes = 0
        self._arrived = threading.Condition()  # guards the events and the failure
        self._events: deque[Event | None] = deque()  # None: a call of `wake`
        self._failure: Exception | None = None
        self._lock = threading.Lock()  # guards the sessions, which `reply` uses in any thread
        self._by_worker: dict[int, WorkerSession] = {}
        self._by_route: dict[bytes, WorkerSession] = {}
        self._wakeup = PollableEvent()
        self._closing = threading.Event()
        self._polled_s = 0.0
        self._thread = threading.Thread(target=self._run, name="paceline-rpc", daemon=True)
        self._thread.start()

    def receive(self, timeout_s: float) -> Event | None:
        """Return the next event in order; None after `wake`, or if no event arrives in time.

        A worker's requests come after its Joined and never after its Lost.
        """
        with self._arrived:
            self._arrived.wait_for(
                lambda: self._events or self._failure or self._closing.is_set(), timeout_s
            )
            if self._failure is not None:
                raise RuntimeError("the server has failed") from self._failure
            return self._events.popleft() if self._events else None

    def wake(self) -> None:
        """Let `receive` return None; any thread may call `wake`."""
        self._put(None)

    def reply(self, request: RpcRequest, message: Message) -> None:
        """Send a reply, unless the worker was lost; any thread may call `reply`."""
        with self._lock:
            session = self._by_worker.get(request.worker)
            if session is not None and session.token == request.session:
                session.reply(request.sequence, message)
        self._wakeup.set()

    def close(self) -> None:
        """Wait at most two seconds for acknowledgements of sent replies, then stop."""
        deadline_s = time.monotonic() + _DRAIN_S
        while self._thread.is_alive() and time.monotonic() < deadline_s:
            with self._lock:
                if not any(session.unacknowledged for session in self._by_route.values()):
                    break
            time.sleep(_BLOCKED_MS * 1e-3)
        self._closing.set()
        self._wakeup.set()
        self._thread.join()
        self._wakeup.close()
        with self._arrived:
            self._arrived.notify_all()
        # Close the socket before the authenticator: without an authenticator, ZeroMQ admits all who
        # know the public key.
        self._router.socket.close(linger=0)
        self._context.destroy(linger=0)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router.socket, zmq.POLLIN)
        poller.register(self._wakeup.fileno(), zmq.POLLIN)
        if self._authenticator is not None:
            poller.register(self._authenticator.socket, zmq.POLLIN)
        try:
            while not self._closing.is_set():
                poller.poll(self._receive_and_send())
                self._wakeup.clear()
        except Exception as error:  # otherwise the application waits forever for events
            with self._arrived:
                self._failure = error
                self._arrived.notify_all()
            raise

    def _receive_and_send(self) -> int:
        """Receive and send without waiting; return how many milliseconds to wait afterwards."""
        if self._authenticator is not None:
            self._authenticator.answer()
        with self._lock:
            for arrival in self._router.receive():
                self._process(arrival)
            if self._clock() - self._polled_s > limits.HEARTBEAT_S:
                self._polled_s = self._clock()
                self._check_workers()
            wait_ms = _POLL_MS
            for session in self._by_worker.values():
                for _ in range(_PIECES_PER_WORKER):
                    is_sent = session.outgoing.send(partial(self._send, session))
                    if is_sent is False:
                        wait_ms = min(wait_ms, _BLOCKED_MS)
                    if not is_sent:
                        break
                else:
                    wait_ms = 0  # this worker may have more pieces
            return wait_ms

    def _process(self, arrival: Arrival) -> None:
        session = self._by_route.get(arrival.route)
        try:
            if len(arrival.frames) != 2:
                raise ProtocolError(f"a message of {len(arrival.frames)} frames instead of 2")
            header, payload = frames.unpack(*arrival.frames), arrival.frames[1]
            if header.kind is MessageKind.HELLO:
                self._admit(arrival, header, payload)
            elif session is None:
                raise ProtocolError(f"a {header.kind.name} from a client that has not joined")
            else:
                self._receive_from(session, header, payload)
        except frames.VersionMismatch as mismatch:
            why = (
                f"the hub speaks protocol version {frames.PROTOCOL}, this worker "
                f"{mismatch.protocol}; install the same paceline on both"
            )
            self._refuse(arrival, MessageKind.REFUSED, why)
        except ProtocolError as error:
            self._refuse(arrival, MessageKind.RESET, str(error))
            if session is not None:
                self._disconnect(session)

    def _check_workers(self) -> None:
        """Send every worker a heartbeat, and drop workers that were silent for too long."""
        now_s = self._clock()
        for session in list(self._by_worker.values()):
            self._send_control(session, MessageKind.HEARTBEAT)
            closed_for_s = now_s - session.disconnected_s
            if session.route is None and closed_for_s > limits.RECONNECT_S:
                why = f"closed its connection and did not return in {limits.RECONNECT_S:g} s"
                self._drop(session, why)
            elif now_s - session.heard_s > limits.LOST_S:
                self._drop(session, f"was silent for {limits.LOST_S:g} s")
        self.refusals.flush()

    def _receive_from(self, session: WorkerSession, header: FrameHeader, payload: Buffer) -> None:
        session.heard_s = self._clock()
        self.received_nbytes += wire_nbytes(payload)
        # Acknowledge replies first: the number of unacknowledged replies limits further requests.
        session.acknowledge(header.acknowledged)
        if header.kind is MessageKind.REQUEST:
            message = session.receive(header, payload)
            if message is not None:
                self._put(RpcRequest(session.worker, message, session.token, header.sequence))
        elif header.kind is MessageKind.BYE:
            self._drop(session, "has left")
        elif header.kind is not MessageKind.HEARTBEAT:
            raise ProtocolError(f"a {header.kind.name}, which workers do not send")

    def _admit(self, arrival: Arrival, header: FrameHeader, payload: Buffer) -> None:
        """Resume or begin a worker's session, or refuse the worker."""
        *names, token = frames.single_parts(header, payload, 3)
        run_id, release = (name.decode(errors="replace") for name in names)
        if mismatch := self._limits.mismatch(header.worker, run_id, release):
            self._refuse(arrival, MessageKind.REFUSED, mismatch)
            return
        session = self._by_worker.get(header.worker)
        if session is None or session.token != token:
            if session is not None:
                # Send a message, because only then does ZeroMQ report a closed connection.
                self._send_control(session, MessageKind.HEARTBEAT)
                silence_s = self._clock() - session.heard_s
                if session.route is not None and silence_s <= limits.SILENCE_S:
                    why = f"another process is worker {header.worker} of this hub"
                    self._refuse(arrival, MessageKind.BUSY, why)
                    return
                self._drop(session, "was replaced by another process")
            session = WorkerSession(header.worker, self._limits, header.sequence, self._clock)
            self._by_worker[header.worker] = session
            self._put(Joined(header.worker))
        session.acknowledge(header.acknowledged)
        # Disconnect the sessions of both this connection and this worker: they may differ, because
        # a client may repeat HELLO over one connection.
        for known in (self._by_route.get(arrival.route), session):
            if known is not None:
                self._disconnect(known)
        session.connect(arrival.route)
        session.heard_s = self._clock()
        self._by_route[arrival.route] = session
        size = self._limits.max_message_nbytes.to_bytes(8, "little")
        welcome = Message("", parts=(session.token, size, self._limits.settings))
        self._send_control(session, MessageKind.WELCOME, session.last_request, welcome)
        self.received_nbytes += wire_nbytes(payload)

    def _send_control(
        self,
        session: WorkerSession,
        kind: MessageKind,
        sequence: int = 0,
        message: Message = frames.NO_CONTENT,
    ) -> None:
        """Send a one-piece message that is no reply; drop the message if the queue is full."""
        self._send(session, next(frames.split(FrameHeader(kind, sequence=sequence), message)))

    def _send(self, session: WorkerSession, piece: frames.MessagePiece) -> bool:
        """Send a piece; return False if the worker is disconnected, or if its queue is full."""
        if session.route is None:
            return False
        try:
            is_sent = self._router.send(session.route, piece)
        except Disconnected:
            self._disconnect(session)
            return False
        if is_sent:
            self.sent_nbytes += wire_nbytes(piece.payload)
        return is_sent

    def _refuse(self, arrival: Arrival, kind: MessageKind, why: str) -> None:
        refused = "dropped a message" if kind is MessageKind.RESET else "refused a worker"
        self.refusals.warning(f"{refused} from {arrival.sender}: {why}")
        text = Message("", parts=(why.encode(errors="replace"),))
        with suppress(Disconnected):  # raised if the worker has already closed the connection
            self._router.send(arrival.route, next(frames.split(FrameHeader(kind), text)))

    def _disconnect(self, session: WorkerSession) -> None:
        if session.route is not None:
            del self._by_route[session.route]
            session.connect(None)

    def _drop(self, session: WorkerSession, why: str) -> None:
        self._disconnect(session)
        del self._by_worker[session.worker]

        def is_void(event: Event | None) -> bool:
            return isinstance(event, RpcRequest) and event.session == session.token

        with self._arrived:
            self._events = deque(one for one in self._events if not is_void(one))
        self._put(Lost(session.worker, why))

    def _put(self, event: Event | None) -> None:
        with self._arrived:
            self._events.append(event)
            self._arrived.notify_all()
