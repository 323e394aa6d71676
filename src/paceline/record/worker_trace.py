"""Record the steps of asynchronous workers and their parameter server, the hub, as a timeline.

The sender records when a message was sent, and the receiver records when the message arrived. The
hub makes a span from the two times.
"""

import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from math import inf
from typing import Annotated, NamedTuple

from pydantic import FailFast, Field, TypeAdapter

from paceline.core.cost import compute_lane
from paceline.core.errors import InvalidInput
from paceline.core.plan import COMPUTE, Kind, Lane, Resource
from paceline.core.timeline import Origin, Span, Timeline, intersection, length, union
from paceline.core.wire_format import Purpose
from paceline.record.recorder import LayerMarks, Phase, layer_spans

ALL_STEPS = range(2**31)
_MOST_SPANS = 200_000  # maximum length of each list in a trace that a worker sends
_MOST_RESOURCES, _LONGEST_NAME = 16, 200
# FailFast stops at the first error: errors for all spans would use more memory than the trace.
_Spans = Annotated[list[Span], FailFast(), Field(max_length=_MOST_SPANS)]


class MessageTime(NamedTuple):
    """The `time.monotonic()` at which a worker's message of a step was sent or received."""

    purpose: str
    worker: int
    step: int
    at_s: float


_Times = Annotated[list[MessageTime], FailFast(), Field(max_length=_MOST_SPANS)]


@dataclass
class Trace:
    """The spans and message times that a process recorded; step 0 is the first recorded step."""

    spans: _Spans = field(default_factory=list)
    sent: _Times = field(default_factory=list)
    received: _Times = field(default_factory=list)

    def add(self, other: "Trace", ahead_s: float = 0.0) -> None:
        """Add another process's trace; that process's clock is `ahead_s` ahead of this one's."""
        self.spans += [span.moved(-ahead_s) for span in other.spans]
        self.sent += [one._replace(at_s=one.at_s - ahead_s) for one in other.sent]
        self.received += [one._replace(at_s=one.at_s - ahead_s) for one in other.received]

    def check(self, worker: int, num_steps: int, purposes: Collection[str]) -> None:
        """Raise InvalidInput if a span or message is invalid, or belongs to another worker.

        `num_steps`: highest valid step of a message. `purposes`: valid purposes of messages.
        """
        for span in self.spans:
            _check_span(span, worker)
        for one in (*self.sent, *self.received):
            is_known = one.purpose in purposes and one.worker == worker
            if not (is_known and 0 <= one.step <= num_steps and 0 <= one.at_s < inf):
                shown = one._replace(purpose=one.purpose[:20])
                raise InvalidInput(
                    "trace", "has a message that is invalid, or of another worker", got=shown
                )

    def as_json(self) -> bytes:
        """Return the trace as JSON, to be sent to the hub."""
        return _TRACE.dump_json(self)


_TRACE = TypeAdapter(Trace)


def _check_span(span: Span, worker: int) -> None:
    where = f"of step {span.step}, part {span.part[:20]!r}"
    if span.worker != worker:
        raise InvalidInput("trace", f"has a span of worker {span.worker}, not of worker {worker}")
    if not (0 <= span.start_s <= span.end_s < inf):
        raise InvalidInput("trace", f"has an impossible span: {span.start_s} to {span.end_s} s")
    if not 0 <= span.step < 2**31 or len(span.part) > _LONGEST_NAME:
        raise InvalidInput("trace", f"has a span {where}: step out of range or name too long")
    if len(span.on) > _MOST_RESOURCES or any(len(one.owner) > _LONGEST_NAME for one in span.on):
        raise InvalidInput("trace", f"has a span {where}: too many resources or too long names")


class WorkerRecorder:
    """Records the steps of a worker, but only steps with numbers in `window`.

    `device`: name of the worker's device in the plan. `marks`: records the times of layers.
    """

    def __init__(
        self, worker: int, device: str, marks: LayerMarks, window: range = ALL_STEPS
    ) -> None:
        self._worker, self._device, self._marks, self._window = worker, device, marks, window
        self.trace = Trace()

    def _number(self, step: int) -> int | None:
        return step - self._window.start if step in self._window else None

    @contextmanager
    def work(
        self, step: int, kind: Kind, part: str = "", lane: Lane = Lane.COMPUTE
    ) -> Iterator[None]:
        """Record the `with` block as a span; a forward or backward pass has a span per layer."""
        number, by_layers = self._number(step), kind in (Kind.FORWARD, Kind.BACKWARD)
        if by_layers:
            self._marks.watch(number is not None)
        # If the worker has no layers, its passes compute only the loss, which gets no span.
        if number is None or (by_layers and not self._marks.names):
            yield
            return
        clock = self._marks.clock
        start = clock.mark()
        yield
        start_s, end_s = clock.seconds([start, clock.mark()])
        on = Resource(self._device, lane)
        if by_layers:
            borders = self._marks.seconds()[kind is Kind.BACKWARD]
            phase = Phase(kind, start_s, end_s, end_s, borders)
            self.trace.spans += layer_spans(number, self._worker, on, self._marks.names, (phase,))
        else:
            self.trace.spans.append(Span(kind, number, part, self._worker, (on,), start_s, end_s))

    def sends(self, step: int, purpose: Purpose) -> None:
        """Record that the worker now sends its message of a step and purpose."""
        if (number := self._number(step)) is not None:
            sent = MessageTime(purpose.value, self._worker, number, time.monotonic())
            self.trace.sent.append(sent)

    def received(self, step: int, purpose: Purpose, at_s: float) -> None:
        """Record that a message was received at `at_s`, a `time.monotonic()` of this process."""
        if (number := self._number(step)) is not None:
            self.trace.received.append(MessageTime(purpose.value, self._worker, number, at_s))


def timeline_of(
    trace: Trace, devices: Mapping[int, str], to_hub: Collection[Purpose], label_share: float
) -> Timeline:
    """Build the timeline of a trace, in which the first span starts at 0 s.

    `devices`: name of each worker's device. `to_hub`: purposes of the messages that workers send to
    the hub (the parameter server). `label_share`: in a message with labels and
    activations, the fraction of bytes that are labels.
    """
    began = {one[:3]: one.at_s for one in trace.sent}
    lanes: dict[Resource, list[Span]] = defaultdict(list)
    for purpose_name, worker, step, end_s in trace.received:
        purpose, device = Purpose(purpose_name), devices[worker]
        start_s = began.get((purpose_name, worker, step))
        if start_s is None:  # the sender was lost before it reported when it sent
            continue
        end_s = max(start_s, end_s)
        border_s = start_s + (end_s - start_s) * label_share
        if purpose is Purpose.LABELS:
            end_s = border_s
        elif purpose is Purpose.ACTIVATIONS:
            start_s = border_s
        lane = Resource(device, Lane.UPLOAD if purpose in to_hub else Lane.DOWNLOAD)
        lanes[lane].append(Span(Kind.SEND, step, purpose, worker, (lane,), start_s, end_s))
    spans = list(trace.spans)
    for messages in lanes.values():
        free_s = -inf  # messages share the link: each starts after the previous one's arrival
        for span in sorted(messages, key=lambda span: (span.end_s, span.start_s)):
            spans.append(span._replace(start_s=max(span.start_s, min(free_s, span.end_s))))
            free_s = span.end_s
    spans.sort(key=lambda span: (span.start_s, span.end_s))
    zero_s = spans[0].start_s if spans else 0.0
    return Timeline((span.moved(-zero_s) for span in spans), Origin.MEASURED)


def utilisation(timeline: Timeline, devices: Iterable[str]) -> dict[str, float]:
    """Return the fraction of traced time in which each device computes.

    Only the time when all workers of a device are traced counts. At other times the device also
    computes untraced steps.
    """
    shares = {}
    for device in devices:
        workers: dict[int | None, list[Span]] = defaultdict(list)
        for span in timeline.tracks.get(compute_lane(device), ()):
            if span.kind in COMPUTE:
                workers[span.worker].append(span)
        start_s = max((min(span.start_s for span in own) for own in workers.values()), default=0.0)
        end_s = min((max(span.end_s for span in own) for own in workers.values()), default=0.0)
        if end_s > start_s:
            busy = union(chain.from_iterable(workers.values()))
            shares[device] = length(intersection(busy, [(start_s, end_s)])) / (end_s - start_s)
    return shares
