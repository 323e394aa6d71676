"""All sessions of a hub: who joins, what comes from whom, who is lost.

What does not belong to a session is dropped. A worker that sends what it may not has its connection
reset: it comes back and goes on where it was, and what it had sent in part is forgotten.
"""

import time

from paceline.wire.conversation import SILENT_S
from paceline.wire.frames import Header, Kind, Malformed, OtherProtocol, unpack
from paceline.wire.inbox import Inbox, Joined, Lost, Request
from paceline.wire.ledger import Ledger
from paceline.wire.line import QUEUED_PIECES
from paceline.wire.messages import Message, Piece, pieces, whole
from paceline.wire.router import Arrival, Router, Unreachable
from paceline.wire.session import Session
from paceline.wire.terms import Terms, introduction, other_protocol
from paceline.wire.texts import Complaints
from paceline.wire.traffic import Traffic

_TURN_PIECES = QUEUED_PIECES // 2


class Sessions:
    """The sessions over one router. Not for several threads at once."""

    def __init__(
        self, router: Router, terms: Terms, inbox: Inbox, traffic: Traffic, complaints: Complaints
    ) -> None:
        self._router, self._terms, self._inbox = router, terms, inbox
        self._traffic, self._complaints = traffic, complaints
        self._of_worker: dict[int, Session] = {}
        self._of_route: dict[bytes, Session] = {}

    @property
    def has_undelivered(self) -> bool:
        """Whether a reply is on its way to a worker that is connected."""
        there = [session for session in self._of_worker.values() if session.route is not None]
        return any(session.ledger.unacknowledged for session in there)

    def reply(self, request: Request, message: Message) -> None:
        """Keep a reply until it has arrived, unless the worker was lost; ValueError if it has one.

        It is sent by `send_replies`.
        """
        session = self._of_worker.get(request.worker)
        if session is not None and session.token == request.session:
            session.ledger.answer(request.sequence, message)
            session.queue(request.sequence)

    def send_replies(self) -> tuple[bool, bool]:
        """Send some pieces to all; return whether there are more, and whether some must wait."""
        has_more = is_stuck = False
        for session in self._of_worker.values():
            has_more = self._send_replies_to(session) or has_more
            is_stuck = session.is_stuck or is_stuck
        return has_more, is_stuck

    def _send_replies_to(self, session: Session) -> bool:
        for _ in range(_TURN_PIECES):
            piece = session.next_piece(self._terms.nonce)
            if piece is None:
                return False
            if not self._put(session, piece):
                session.keep(piece)
                return False
        return True

    def hear(self, arrival: Arrival) -> None:
        """Take what came over a connection, whatever it is."""
        try:
            if not arrival.is_piece:
                raise Malformed("a message that is not a header and a piece")
            header = unpack(arrival.frame, arrival.payload)
            if header.kind is Kind.HELLO:
                self._greet(arrival, header)
                return
            session = self._of_route.get(arrival.route)
            if session is None:
                raise Malformed(f"a {header.kind.name} of somebody who has not joined")
            self._hear_from(session, header, arrival)
        except OtherProtocol as other:
            self._refuse(arrival, Kind.REFUSED, other_protocol(other.protocol))
        except Malformed as trouble:
            self._complaints.add(f"dropped what came from {arrival.sender}: {trouble}")
            self._reset(arrival.route)

    def look_after_all(self) -> None:
        """Give every worker a sign of life, and give up those that were silent for too long."""
        terms = self._terms
        for session in list(self._of_worker.values()):
            self._beat(session)
            now_s = time.monotonic()
            if session.route is None and now_s - session.closed_s > terms.gone_after_s:
                self._lose(
                    session,
                    f"closed its connection and has not come back in {terms.gone_after_s:g} s",
                )
            elif now_s - session.heard_s > terms.lost_after_s:
                self._lose(session, f"was silent for {terms.lost_after_s:g} s")
        self._complaints.tell()

    def _hear_from(self, session: Session, header: Header, arrival: Arrival) -> None:
        if header.run != self._terms.nonce or header.worker != session.worker:
            raise Malformed(f"a {header.kind.name} of another run or worker")
        session.heard_s = time.monotonic()
        self._traffic.count_received(header, arrival.payload)
        session.ledger.settle(header.arrived)
        if header.kind is Kind.REQUEST:
            message = session.take(header, arrival.payload)
            if message is not None:
                self._inbox.put(Request(session.worker, message, session.token, header.sequence))
        elif header.kind is Kind.BYE:
            self._lose(session, "has left", has_left=True)
        elif header.kind is not Kind.BEAT:
            raise Malformed(f"a {header.kind.name}, which no worker sends")

    def _greet(self, arrival: Arrival, header: Header) -> None:
        """Take a worker in, in its session if there is one; or tell it why not."""
        run_id, layout, token = introduction(whole(header, arrival.payload).parts)
        difference = self._terms.difference(header.worker, run_id, layout)
        if difference:
            self._refuse(arrival, Kind.REFUSED, difference)
            return
        session = self._of_worker.get(header.worker)
        if session is None or session.token != token:
            if session is not None and self._is_there(session):
                self._refuse(arrival, Kind.BUSY, f"the hub has a worker {header.worker} already")
                return
            session = self._begin(header)
        session.ledger.settle(header.arrived)
        self._seat(session, arrival.route)
        self._traffic.count_received(header, arrival.payload)

    def _begin(self, header: Header) -> Session:
        """Begin a session; the one that this worker's number had is over."""
        before = self._of_worker.get(header.worker)
        if before is not None:
            self._lose(before, "was replaced by another process")
        ledger = Ledger(self._terms.largest_nbytes, header.sequence)
        session = self._of_worker[header.worker] = Session(header.worker, ledger)
        self._inbox.put(Joined(header.worker))
        return session

    def _seat(self, session: Session, route: bytes) -> None:
        """Go on with a session over a new connection."""
        other = self._of_route.get(route)
        for one in (other, session):
            if one is not None:
                self._disconnect(one)
        session.connect(route)
        session.heard_s = time.monotonic()
        self._of_route[route] = session
        header = self._header(Kind.WELCOME, session, session.ledger.highest)
        welcome = self._terms.welcome(session.token)
        self._put(session, next(pieces(header, welcome)))

    def _is_there(self, session: Session) -> bool:
        self._beat(session)  # of a connection that is gone, the socket knows it then
        is_heard = time.monotonic() - session.heard_s <= SILENT_S
        return session.route is not None and is_heard

    def _beat(self, session: Session) -> None:
        header = self._header(Kind.BEAT, session, 0)
        self._put(session, next(pieces(header, Message(""))))

    def _header(self, kind: Kind, session: Session, sequence: int) -> Header:
        return Header(kind, self._terms.nonce, session.worker, sequence)

    def _put(self, session: Session, piece: Piece) -> bool:
        """Send a piece to a worker; False if it has no connection, or too much is on its way."""
        if session.route is None:
            return False
        try:
            is_sent = self._router.send(session.route, piece)
        except Unreachable:
            self._disconnect(session)
            return False
        if is_sent:
            self._traffic.count_sent(piece.header, piece.payload)
        return is_sent

    def _refuse(self, arrival: Arrival, kind: Kind, why: str) -> None:
        self._complaints.add(f"refused a worker from {arrival.sender}: {why}")
        text = Message("", parts=(why.encode(errors="replace"),))
        self._tell(arrival.route, next(pieces(Header(kind), text)))

    def _reset(self, route: bytes) -> None:
        self._tell(route, next(pieces(Header(Kind.RESET), Message(""))))
        session = self._of_route.get(route)
        if session is not None:
            self._disconnect(session)

    def _tell(self, route: bytes, piece: Piece) -> None:
        try:
            self._router.send(route, piece)
        except Unreachable:
            return  # whoever it was has gone

    def _disconnect(self, session: Session) -> None:
        if session.route is not None:
            del self._of_route[session.route]
            session.disconnect()

    def _lose(self, session: Session, why: str, *, has_left: bool = False) -> None:
        self._disconnect(session)
        del self._of_worker[session.worker]
        self._inbox.drop(session.token)
        self._inbox.put(Lost(session.worker, why, has_left))
