"""The messages between coordinator and workers (section V): ScheduleWork and ExecuteWork.

They are fixed-size structures. A packet of a unix socket holds one ExecuteWork, or the ScheduleWork
of one or several batches. A worker that fails sends its reason in place of the next ScheduleWork.
Times are nanoseconds of CLOCK_MONOTONIC. A worker process is started with its `ProcessSettings`.
"""

import struct
from enum import IntEnum
from typing import NamedTuple, Self

from pydantic import TypeAdapter

from paceline.checkpoints.memory_file import read_state, write_state
from paceline.core.errors import InvalidInput
from paceline.core.settings import Record, TrainSettings
from paceline.core.timeline import Span
from paceline.links.shared_memory import TensorSpec
from paceline.strategies.hogbatch.config import WorkerSpec
from paceline.strategies.hogbatch.statistics import BatchResult

_EXECUTE = struct.Struct("<BqqqdB")
_SCHEDULE = struct.Struct("<Bqqqd7q")
_SPANS = TypeAdapter(list[Span])
_SCHEDULED, _FAILED = 1, 2
_MOST_TEXT = 4096
MOST_NBYTES = 1 + _MOST_TEXT

READY, TRIED, SAVED, LOADED = -1, -2, -3, -4  # in place of the number of a batch

# The names of the tensors that all workers share beside the model.
INPUTS, TARGETS, ORDER, COMMITTED = "inputs", "targets", "order", "committed"


class SharedMemoryHandle(NamedTuple):
    """The descriptor of shared memory, which workers inherit, and the tensors in it."""

    fd: int
    entries: tuple[TensorSpec, ...]


class Training(Record):
    """The training that all workers of a run have in common.

    Workers know the recipe by the settings, too. Where the samples are tensors, these are in the
    `data`, and `num_classes` are the recipe's.
    """

    settings: TrainSettings
    num_classes: int | None
    parameters: SharedMemoryHandle
    data: SharedMemoryHandle


class ProcessSettings(Record):
    """The settings of a worker process, and the descriptors that it inherits.

    `cores` are the processors that it is pinned to; none leaves it where it is. `depth` is the
    number of batches that it has in work at once. To the file `state` goes what a checkpoint has of
    it alone, and at its end its spans.
    """

    number: int
    spec: WorkerSpec
    depth: int
    cores: tuple[int, ...]
    socket: int
    state: int
    training: Training


class Command(IntEnum):
    """The work of a worker.

    It stops, trains on a batch, tries how long batches of a size take, writes its state to the file
    that it has in common with the coordinator, or reads it there.
    """

    STOP = 0
    TRAIN = 1
    TRY = 2
    SAVE = 3
    LOAD = 4


class ExecuteWork(NamedTuple):
    """A message of the coordinator to a worker.

    TRAIN: on `size` samples from place `first` of the epoch's order, with the learning rate times
    `rate`. TRY: batches of `size` for about `rate` seconds, on a copy of the model.
    """

    command: Command
    batch: int = 0
    first: int = 0
    size: int = 0
    rate: float = 0.0
    traced: bool = False

    @property
    def places(self) -> range:
        """The places of the samples in the epoch's order."""
        return range(self.first, self.first + self.size)

    def pack(self) -> bytes:
        """Return the bytes of a packet."""
        return _EXECUTE.pack(*self)

    @classmethod
    def unpack(cls, packet: bytes) -> Self:
        """Return the message of a packet; ValueError if it is none."""
        if len(packet) != _EXECUTE.size:
            raise ValueError(f"{len(packet)} bytes are no ExecuteWork, which has {_EXECUTE.size}")
        command, batch, first, size, rate, traced = _EXECUTE.unpack(packet)
        return cls(Command(command), batch, first, size, rate, bool(traced))


class ScheduleWork(NamedTuple):
    """A worker's request for work, with the result of its last batch of `size` samples.

    `batch` is the number of the ExecuteWork, READY before the first, TRIED after a trial, of which
    `result.ended_ns` is the duration, SAVED or LOADED when its state is written or read.
    """

    batch: int
    size: int = 0
    result: BatchResult = BatchResult()

    def pack(self) -> bytes:
        """Return the bytes of a packet."""
        return _SCHEDULE.pack(_SCHEDULED, self.batch, self.size, *self.result)


class Failure(NamedTuple):
    """The reason why a worker has failed. `by_input` is True if the user's input is to blame."""

    by_input: bool
    reason: str

    def pack(self) -> bytes:
        """Return the bytes of a packet, which holds the beginning of a long reason."""
        text = self.reason.encode()[: _MOST_TEXT - 1]
        return bytes((_FAILED, self.by_input)) + text


def unpack(packet: bytes) -> tuple[ScheduleWork, ...] | Failure:
    """Return the messages of a worker's packet; ValueError if there are none."""
    kind = packet[0] if packet else 0
    if kind == _SCHEDULED and len(packet) % _SCHEDULE.size == 0:
        rows = tuple(_SCHEDULE.iter_unpack(packet))
        if all(row[0] == _SCHEDULED for row in rows):
            return tuple(ScheduleWork(row[1], row[2], BatchResult._make(row[3:])) for row in rows)
    if kind == _FAILED and 2 <= len(packet) <= MOST_NBYTES:
        return Failure(bool(packet[1]), packet[2:].decode(errors="replace"))
    raise ValueError(f"{len(packet)} bytes of kind {kind} are no message of a worker")


def leave(state: int, spans: list[Span], peak_nbytes: int) -> None:
    """Write what a worker leaves at its end: its traced spans, and its peak of memory."""
    write_state(state, {}, {"spans": _SPANS.dump_json(spans).decode(), "peak": peak_nbytes})


def left_by(state: int) -> tuple[list[Span], int]:
    """Return what a worker has left; nothing if it was killed before, or meanwhile."""
    try:
        _, values = read_state(state)
    except InvalidInput:
        return [], 0
    return _SPANS.validate_json(values.get("spans", "[]")), values.get("peak", 0)
