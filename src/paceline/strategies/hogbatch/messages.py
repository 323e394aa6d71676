"""The two messages of the coordinator and its workers, section V: ScheduleWork and ExecuteWork.

They are fixed-size structures. A packet of a unix socket holds one ExecuteWork, or what a worker
has to say of one or several batches. A worker that fails sends its reason in place of the next
ScheduleWork. Times are nanoseconds of CLOCK_MONOTONIC.
"""

import struct
from enum import IntEnum
from typing import NamedTuple, Self

_EXECUTE = struct.Struct("<BqqqdB")
_SCHEDULE = struct.Struct("<Bqqqd6q")
_SCHEDULED, _FAILED = 1, 2
_MOST_TEXT = 4096
MOST_NBYTES = 1 + _MOST_TEXT

READY, TRIED = -1, -2  # in place of the number of a batch


class Order(IntEnum):
    """What a worker is to do: stop, train on a batch, or try how long batches of a size take."""

    STOP = 0
    TRAIN = 1
    TRY = 2


class ExecuteWork(NamedTuple):
    """What the coordinator asks of a worker.

    To train on `size` samples from place `first` of the epoch's order, with the learning rate times
    `rate`. To try batches of `size` for about `rate` seconds, on a copy of the model.
    """

    order: Order
    batch: int = 0
    first: int = 0
    size: int = 0
    rate: float = 0.0
    traced: bool = False

    def packed(self) -> bytes:
        """Return the bytes of a packet."""
        return _EXECUTE.pack(*self)

    @classmethod
    def of(cls, packet: bytes) -> Self:
        """Return the message of a packet; ValueError if it is none."""
        if len(packet) != _EXECUTE.size:
            raise ValueError(f"{len(packet)} bytes are no ExecuteWork, which has {_EXECUTE.size}")
        order, batch, first, size, rate, traced = _EXECUTE.unpack(packet)
        return cls(Order(order), batch, first, size, rate, bool(traced))


class ScheduleWork(NamedTuple):
    """A worker asks for work, and says what it has done: `updates` on `size` samples.

    `batch` is the number of what it was given, READY before the first, TRIED after a trial, which
    took from `started_ns` to `ended_ns`. `loss` is the sum over the samples. The model was read at
    `read_ns`; the update was computed at `stepped_ns`, and in the model at `ended_ns`.
    """

    batch: int
    size: int = 0
    updates: int = 0
    loss: float = 0.0
    started_ns: int = 0
    read_ns: int = 0
    forward_ns: int = 0
    backward_ns: int = 0
    stepped_ns: int = 0
    ended_ns: int = 0

    def packed(self) -> bytes:
        """Return the bytes of a packet."""
        return _SCHEDULE.pack(_SCHEDULED, *self)

    @property
    def times(self) -> tuple[int, ...]:
        """The six moments, in their order."""
        return (
            self.started_ns,
            self.read_ns,
            self.forward_ns,
            self.backward_ns,
            self.stepped_ns,
            self.ended_ns,
        )


class Failure(NamedTuple):
    """Why a worker has failed. `by_input` says whether the input is to blame."""

    by_input: bool
    reason: str

    def packed(self) -> bytes:
        """Return the bytes of a packet, which holds the beginning of a long reason."""
        text = self.reason.encode()[: _MOST_TEXT - 1]
        return bytes((_FAILED, self.by_input)) + text


def read(packet: bytes) -> tuple[ScheduleWork, ...] | Failure:
    """Return the messages of a worker's packet; ValueError if there are none."""
    kind = packet[0] if packet else 0
    if kind == _SCHEDULED and len(packet) % _SCHEDULE.size == 0:
        rows = tuple(_SCHEDULE.iter_unpack(packet))
        if all(row[0] == _SCHEDULED for row in rows):
            return tuple(ScheduleWork._make(row[1:]) for row in rows)
    if kind == _FAILED and 2 <= len(packet) <= MOST_NBYTES:
        return Failure(bool(packet[1]), packet[2:].decode(errors="replace"))
    raise ValueError(f"{len(packet)} bytes of kind {kind} are no message of a worker")
