"""What has gone over the wire, by topic and direction."""

import threading
from dataclasses import dataclass

from paceline.wire.frames import HEADER_NBYTES, Buffer, Header, Kind

_MOST_TOPICS = 64
_OTHER = "other"
_FRAME_NBYTES = 2 + 9  # what ZMTP puts before a header, and at most before a piece


@dataclass(frozen=True, slots=True)
class Count:
    """Messages and their payload in bytes, as sent and received; repeated ones count again."""

    sent: int = 0
    sent_nbytes: int = 0
    received: int = 0
    received_nbytes: int = 0


class Traffic:
    """Counters that any thread may read while others count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._topics: dict[str, list[int]] = {}
        self._totals = [0, 0]

    def by_topic(self) -> dict[str, Count]:
        """Return the counts of requests and replies so far, by topic."""
        with self._lock:
            return {topic: Count(*numbers) for topic, numbers in self._topics.items()}

    @property
    def sent_nbytes(self) -> int:
        """Bytes sent of all kinds, with headers, but without what CURVE and TCP add."""
        return self._totals[0]

    @property
    def received_nbytes(self) -> int:
        """Bytes received of all kinds, with headers, but without what CURVE and TCP add."""
        return self._totals[1]

    def count_sent(self, header: Header, piece: Buffer) -> None:
        """Count a piece that was handed to the socket."""
        self._count(header, piece, 0)

    def count_received(self, header: Header, piece: Buffer) -> None:
        """Count a piece that came as it was sent."""
        self._count(header, piece, 1)

    def _count(self, header: Header, piece: Buffer, direction: int) -> None:
        nbytes = memoryview(piece).nbytes
        is_last = header.offset + nbytes == header.total_nbytes
        with self._lock:
            self._totals[direction] += nbytes + HEADER_NBYTES + _FRAME_NBYTES
            if header.kind in (Kind.REQUEST, Kind.REPLY):
                numbers = self._numbers(header.topic)
                numbers[2 * direction] += is_last
                numbers[2 * direction + 1] += nbytes

    def _numbers(self, topic: str) -> list[int]:
        """Return the counts of a topic. What a peer can send must not grow without bound."""
        if topic not in self._topics and len(self._topics) >= _MOST_TOPICS:
            topic = _OTHER
        return self._topics.setdefault(topic, [0, 0, 0, 0])
