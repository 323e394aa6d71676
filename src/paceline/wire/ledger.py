"""The hub's book about one worker: what it has asked, and what the answer was.

Within a session a worker's requests come in the order of their sequence numbers, also when they are
sent again after a new connection. So the highest that is complete says which are new: each is
executed at most once. A reply is kept until the worker says that it has arrived.
"""

from paceline.wire.frames import Malformed
from paceline.wire.messages import Message

WINDOW = 8  # requests of a worker whose replies it does not have
_CREDIT_MESSAGES = 2  # of the largest: one is executed while the next is on its way


def credit_of(largest_nbytes: int) -> int:
    """Return how many bytes of requests a worker may have sent without a reply."""
    return _CREDIT_MESSAGES * largest_nbytes


class Ledger:
    """The requests of one worker in one session, none of more than `largest_nbytes`."""

    def __init__(self, largest_nbytes: int, highest: int) -> None:
        self._largest = largest_nbytes
        self._credit = credit_of(largest_nbytes)
        self.highest = highest  # every request up to it is complete
        self._held: dict[int, int] = {}  # bytes of those without a reply
        self._replies: dict[int, Message] = {}
        self._arrived = highest

    @property
    def unacknowledged(self) -> list[int]:
        """The requests whose replies are there, but are not known to have arrived."""
        return sorted(self._replies)

    def check(self, sequence: int, nbytes: int) -> bool:
        """Return whether this request is new; Malformed if it is one too many.

        Asked before memory is taken for it.
        """
        if sequence <= self.highest:
            return False
        held = sum(self._held.values())
        if nbytes > self._largest:
            raise Malformed(f"a request of {nbytes} bytes, more than {self._largest}")
        if held + nbytes > self._credit:
            raise Malformed(
                f"a request of {nbytes} bytes beside {held} unanswered ones, where the credit is "
                f"{self._credit} bytes"
            )
        if len(self._held) + len(self._replies) >= WINDOW:
            raise Malformed(f"more than {WINDOW} requests whose replies have not arrived")
        return True

    def take(self, sequence: int, nbytes: int) -> None:
        """Note that a new request is complete, and will be executed."""
        assert sequence > self.highest
        self.highest = sequence
        self._held[sequence] = nbytes

    def answer(self, sequence: int, reply: Message) -> None:
        """Keep the reply to a request. ValueError if there is none to it, or one already."""
        if sequence not in self._held:
            raise ValueError(f"request {sequence} is not waiting for a reply")
        del self._held[sequence]
        self._replies[sequence] = reply

    def reply(self, sequence: int) -> Message | None:
        """Return the reply to a request, if there is one that may not have arrived."""
        return self._replies.get(sequence)

    def settle(self, arrived: int) -> None:
        """Forget the replies up to `arrived`: the worker has them."""
        if arrived <= self._arrived:
            return
        self._arrived = arrived
        for sequence in [known for known in self._replies if known <= arrived]:
            del self._replies[sequence]
