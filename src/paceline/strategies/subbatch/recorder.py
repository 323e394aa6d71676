"""The recorder of a rank whose head is sharded: layers of the head for each sub-batch."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from paceline.core.cost import compute_lane
from paceline.core.plan import Kind, TaskId
from paceline.core.timeline import Span
from paceline.record.clock import Clock
from paceline.record.recorder import Recorder


class HeadRecorder(Recorder):
    """A recorder that records the layers of the head for each sub-batch, too."""

    def __init__(self, clock: Clock, device: str, rank: int) -> None:
        super().__init__(clock, device, rank)
        self._computed: list[tuple[TaskId, Any, Any]] = []  # between two marks of the clock

    def start_trace(self, model: nn.Module) -> None:
        """Record the spans of the following steps of `model`, until `stop_trace`."""
        super().start_trace(model)
        self._computed = []

    @contextmanager
    def computing(self, kind: Kind, part: str, number: int) -> Iterator[None]:
        """Record the computation inside as a part of the sub-batch of that number."""
        if not self.tracing:
            yield
            return
        task, start = TaskId(self._step, kind, part, self._rank, number), self._clock.mark()
        yield
        self._computed.append((task, start, self._clock.mark()))

    def spans(self) -> list[Span]:
        """Return the spans of the traced steps; waits for the device where marks need that."""
        starts = self._clock.seconds([start for _, start, _ in self._computed])
        ends = self._clock.seconds([end for _, _, end in self._computed])
        on = (compute_lane(self._device),)
        own = [
            Span(one.kind, one.step, one.part, one.worker, on, start, end, one.sub_batch)
            for (one, _, _), start, end in zip(self._computed, starts, ends, strict=True)
        ]
        return super().spans() + own
