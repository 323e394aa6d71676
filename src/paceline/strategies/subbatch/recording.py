"""The record of a rank whose steps have sub-batches: their parts beside the phases of the body."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from paceline.core.cost import compute_lane
from paceline.core.plan import Kind, task_name
from paceline.core.timeline import Span
from paceline.record.clock import Clock
from paceline.record.recorder import Recorder


class _Part(NamedTuple):
    """What this rank computed for a layer of the head in a pass."""

    step: int
    kind: Kind
    part: str
    number: int
    start: Any
    end: Any


class PassRecorder(Recorder):
    """A recorder that knows the passes through the head, too, under the names that the plan has."""

    def __init__(self, clock: Clock, device: str, rank: int) -> None:
        super().__init__(clock, device, rank)
        self._parts: list[_Part] = []

    def _begin_trace(self) -> None:
        super()._begin_trace()
        self._parts = []

    @contextmanager
    def computing(self, kind: Kind, part: str, number: int) -> Iterator[None]:
        """Record what runs inside as a part of the pass of that number."""
        if not self.tracing:
            yield
            return
        start = self._clock.mark()
        yield
        self._parts.append(_Part(self._step, kind, part, number, start, self._clock.mark()))

    def spans(self) -> list[Span]:
        """Return the spans of the traced steps; waits for the device where marks need that."""
        starts = self._clock.seconds([part.start for part in self._parts])
        ends = self._clock.seconds([part.end for part in self._parts])
        on = (compute_lane(self._device),)
        own = [
            Span(
                task_name(one.step, one.kind, f"{one.part}/{one.number}", self._rank),
                one.kind,
                on,
                start,
                end,
                one.part,
            )
            for one, start, end in zip(self._parts, starts, ends, strict=True)
        ]
        return super().spans() + own
