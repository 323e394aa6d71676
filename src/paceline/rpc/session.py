"""One worker's requests and replies at the hub, over one connection or several."""

import os
import time
from collections import deque
from collections.abc import Callable

from paceline.rpc import frames, limits
from paceline.rpc.frames import Buffer, FrameHeader, Message, MessageKind, ProtocolError
from paceline.rpc.limits import Limits


class WorkerSession:
    """One worker's requests and replies, over one connection or several.

    A worker numbers its requests, sends them in ascending order, and repeats interrupted requests
    in this order over a new connection. So a request is new if its number is above `last_request`,
    the last request that arrived completely. The session keeps a reply until the worker
    acknowledges the reply.

    `route`: the current connection, or None. `disconnected_s`: the time of the last disconnection.
    `heard_s`: the time of the worker's last message.
    """

    def __init__(
        self,
        worker: int,
        limits: Limits,
        last_request: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.worker, self._clock = worker, clock
        self.token = os.urandom(frames.SESSION_NBYTES)  # unique among all sessions of all hubs
        self.heard_s = self._clock()
        self.last_request = last_request
        self._limits = limits
        self._executing: dict[int, int] = {}  # bytes of each unanswered request, by its number
        self._replies: dict[int, Message] = {}  # replies that are not acknowledged, by number
        self.connect(None)

    @property
    def unacknowledged(self) -> list[int]:
        """The numbers of the requests whose replies are not acknowledged."""
        return sorted(self._replies)

    def connect(self, route: bytes | None) -> None:
        """Use connection `route`, and send unacknowledged replies again; None: no connection."""
        self.route = route
        self._assembly = frames.Assembly()
        self.outgoing = frames.PieceQueue(self._next_reply)
        self._unsent: deque[int] = deque(self.unacknowledged if route is not None else ())
        if route is None:
            self.disconnected_s = self._clock()

    def receive(self, header: FrameHeader, payload: Buffer) -> Message | None:
        """Process a piece of a request; return the request if it is complete and new.

        Raises ProtocolError if the piece is out of order, or if the request exceeds the limits.
        """
        if header.sequence <= self.last_request:  # repeated, because the reply has not arrived
            self._queue_reply(header.sequence)
            return None
        # Check the limits before allocating memory for the request.
        nbytes, executing = header.total_nbytes, sum(self._executing.values())
        max_nbytes = self._limits.max_message_nbytes
        credit = limits.CREDIT_MESSAGES * max_nbytes
        if nbytes > max_nbytes:
            raise ProtocolError(f"a request of {nbytes} bytes, above the limit of {max_nbytes}")
        if executing + nbytes > credit:
            problem = f"{executing + nbytes} bytes of unanswered requests"
            raise ProtocolError(f"{problem}, above the limit of {credit}")
        if len(self._executing) + len(self._replies) >= limits.WINDOW:
            raise ProtocolError(f"more than {limits.WINDOW} requests without an acknowledged reply")
        message = self._assembly.add(header, payload)
        if message is not None:
            self.last_request = header.sequence
            self._executing[header.sequence] = nbytes
        return message

    def reply(self, sequence: int, message: Message) -> None:
        """Store the reply to a request, and queue it to be sent."""
        del self._executing[sequence]
        self._replies[sequence] = message
        self._queue_reply(sequence)

    def acknowledge(self, sequence: int) -> None:
        """Forget the replies up to `sequence`, which the worker has received."""
        for known in [known for known in self._replies if known <= sequence]:
            del self._replies[known]

    def _queue_reply(self, sequence: int) -> None:
        is_known = sequence in self._replies and sequence not in self._unsent
        if self.route is not None and is_known:
            self._unsent.append(sequence)

    def _next_reply(self) -> tuple[FrameHeader, Message] | None:
        while self._unsent:
            sequence = self._unsent.popleft()
            reply = self._replies.get(sequence)  # None if acknowledged in the meantime
            if reply is not None:
                return FrameHeader(MessageKind.REPLY, sequence=sequence), reply
        return None
