"""The hub's end of the wire: one address, a session with every worker, requests to execute."""

import threading
from collections.abc import Callable

import zmq

from paceline.core.errors import InvalidInput
from paceline.wire import addresses
from paceline.wire.desk import Desk
from paceline.wire.door import Door
from paceline.wire.inbox import Event, Inbox, Request, Woken
from paceline.wire.keys import HubKeys
from paceline.wire.messages import Message
from paceline.wire.router import Router
from paceline.wire.sessions import Sessions
from paceline.wire.terms import Terms
from paceline.wire.texts import Complaints
from paceline.wire.traffic import Traffic

_DRAIN_S = 2.0


class Service:
    """Takes in the workers of a run, and gives their requests to whoever calls `receive`.

    `address` is one address, such as tcp://10.0.0.1:5555, with port 0 for any free one; without
    `keys` it is one that only this machine reaches. `layout` is a hash of what hub and workers must
    agree on. `largest_nbytes` are those of the largest request or reply; a worker may have twice as
    many at the hub that are not replied to. `settings`, at most 64 KiB, go to every worker. `say`
    is told, from another thread, of strangers and of what they send.

    A worker that is silent for `lost_after_s`, or whose connection is closed and not made again for
    `gone_after_s` (its process has ended), is lost.
    """

    def __init__(
        self,
        address: str,
        run_id: str,
        layout: str,
        *,
        keys: HubKeys | None,
        num_workers: int,
        largest_nbytes: int,
        settings: bytes,
        say: Callable[[str], None],
        lost_after_s: float = 60.0,
        gone_after_s: float = 5.0,
    ) -> None:
        terms = Terms(
            run_id, layout, num_workers, largest_nbytes, settings, lost_after_s, gone_after_s
        )
        at = addresses.to_bind(address, has_keys=keys is not None)
        self._complaints = Complaints(say)
        self._largest_nbytes = largest_nbytes
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # The door first: without one, ZeroMQ would let everybody in who knows the hub's key.
        self._door = Door(self._context, keys.workers, self._complaints.add) if keys else None
        try:
            self._router = Router(self._context, at, keys)
        except InvalidInput:
            self._close_context()
            raise
        self.address = self._router.address
        self.traffic = Traffic()
        self._inbox = Inbox()
        sessions = Sessions(self._router, terms, self._inbox, self.traffic, self._complaints)
        self._desk = Desk(self._router, self._door, sessions, self._inbox)
        self._thread = threading.Thread(target=self._desk.run, name="paceline-wire", daemon=True)
        self._thread.start()

    @property
    def num_refused(self) -> int:
        """How often something was refused or dropped: clients, keys, and what is no message."""
        return self._complaints.num_all

    def receive(self, timeout_s: float) -> Event | None:
        """Return what is next; None if there is nothing for that long. In order, each once.

        A request of a worker comes after it has joined, and never after it was lost.
        """
        return self._inbox.get(timeout_s)

    def wake(self) -> None:
        """Have `receive` return Woken, after what is there already; from any thread."""
        self._inbox.put(Woken())

    def reply(self, request: Request, message: Message) -> None:
        """Send a reply, from any thread; nothing if the worker was lost since.

        The message's parts must not change until the reply has arrived. ValueError if the request
        has one already, or the message is larger than the service was told.
        """
        if message.nbytes > self._largest_nbytes:
            raise ValueError(
                f"a reply of {message.nbytes} bytes is larger than {self._largest_nbytes}"
            )
        self._desk.reply(request, message)

    def close(self) -> None:
        """Give replies that are on their way two seconds to arrive, and stop. Twice is fine."""
        if self._thread.is_alive():
            self._desk.drain(_DRAIN_S)
        self._desk.stop()
        self._thread.join()
        self._desk.close()
        self._inbox.close()
        self._router.close()
        self._close_context()

    def _close_context(self) -> None:
        if self._door is not None:
            self._door.close()
        self._context.term()
