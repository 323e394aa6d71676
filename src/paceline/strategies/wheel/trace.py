"""What one half of a worker did in the traced steps: spans, and when messages left and came.

A message's span begins at one end of a connection and ends at the other: each notes its own time,
and the hub puts the two together.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from paceline.core.cost import compute_lane
from paceline.core.errors import InvalidInput
from paceline.core.plan import Kind, Resource, task_name
from paceline.core.timeline import Span
from paceline.record.clock import Clock
from paceline.record.marks import LayerMarks, Phase, layer_spans
from paceline.strategies.wheel.split import Purpose

_NS = 1e-9


class Leaf(NamedTuple):
    """A moment of a message: its purpose, its worker, its step, and the seconds of a clock."""

    purpose: str
    worker: int
    step: int
    at_s: float


@dataclass
class Record:
    """What a process has traced; steps count from the first traced one."""

    spans: list[Span] = field(default_factory=list)
    left: list[Leaf] = field(default_factory=list)
    came: list[Leaf] = field(default_factory=list)

    def add(self, other: "Record", ahead_s: float = 0.0) -> None:
        """Take over what another process has traced, whose clock is ahead of this one's."""
        for span in other.spans:
            start_s, end_s = span.start_s - ahead_s, span.end_s - ahead_s
            self.spans.append(span._replace(start_s=start_s, end_s=end_s))
        self.left += [leaf._replace(at_s=leaf.at_s - ahead_s) for leaf in other.left]
        self.came += [leaf._replace(at_s=leaf.at_s - ahead_s) for leaf in other.came]


_RECORD = TypeAdapter(Record)


def packed(record: Record) -> bytes:
    """Return a record as it travels."""
    return _RECORD.dump_json(record)


def record_of(data: bytes) -> Record:
    """Return the record of these bytes; InvalidInput if they are none."""
    try:
        return _RECORD.validate_json(data)
    except ValidationError as error:
        raise InvalidInput(f"a trace that cannot be read: {error.error_count()} faults") from None


class Trace:
    """Traces one worker's half, which computes on `lane`, in the steps of `window`."""

    def __init__(
        self, worker: int, device: str, marks: LayerMarks, clock: Clock, window: range
    ) -> None:
        self._worker, self._window = worker, window
        self._marks, self._clock = marks, clock
        self._lane = compute_lane(device)
        self._device = device
        self.record = Record()

    def _number(self, step: int) -> int | None:
        return step - self._window.start if step in self._window else None

    @contextmanager
    def work(self, step: int, kind: Kind, part: str = "", lane: str = "") -> Iterator[None]:
        """Trace what runs inside as one span: on the compute lane, or on another of the device."""
        number = self._number(step)
        if number is None:
            yield
            return
        start = self._clock.mark()
        yield
        start_s, end_s = self._clock.seconds([start, self._clock.mark()])
        on = (Resource(self._device, lane) if lane else self._lane,)
        name = task_name(number, kind, part, self._worker)
        self.record.spans.append(Span(name, kind, on, start_s, end_s, part))

    @contextmanager
    def layers(self, step: int, kind: Kind) -> Iterator[None]:
        """Trace what runs inside layer by layer: the forward or the backward of the half."""
        number = self._number(step)
        self._marks.watch(number is not None)
        if number is None:
            yield
            return
        start = self._clock.mark()
        yield
        self.add_layers(number, kind, start, self._clock.mark())

    def add_layers(self, number: int, kind: Kind, start: Any, end: Any) -> None:
        """Add the spans of a forward or a backward between two marks."""
        start_s, end_s = self._clock.seconds([start, end])
        borders = self._marks.seconds()[kind is Kind.BACKWARD]
        phase = Phase(kind, start_s, end_s, end_s, borders)
        self.record.spans += layer_spans(
            number, self._worker, self._lane, self._marks.names, (phase,)
        )

    def leaves(self, step: int, purpose: Purpose, at_s: float | None = None) -> None:
        """Note that a message is handed over to the network, now if no time is given."""
        self._note(self.record.left, step, purpose, at_s)

    def comes(self, step: int, purpose: Purpose, at_s: float | None = None) -> None:
        """Note that a message is here."""
        self._note(self.record.came, step, purpose, at_s)

    def _note(self, leaves: list[Leaf], step: int, purpose: Purpose, at_s: float | None) -> None:
        number = self._number(step)
        if number is not None:
            now_s = time.monotonic_ns() * _NS if at_s is None else at_s
            leaves.append(Leaf(purpose.value, self._worker, number, now_s))
