"""What each worker did and when, in the last rounds, and one timeline of all of them.

A message's span begins at one end of a connection and ends at the other: each end records its own
times, and the hub puts the two together.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field, TypeAdapter

from paceline.core.cost import compute_lane
from paceline.core.plan import Kind, Lane, Resource
from paceline.core.timeline import Origin, Span, Timeline
from paceline.rpc.reading import MOST_SPANS, Spans

NUM_TRACED = 20  # rounds
BESIDE = ".beside"  # of the part that inner steps are beside which a fragment travels
GRADIENT = ".gradient"  # of a part whose outer gradient a worker makes
TAKEN = ".hub"  # of a part that the hub looks at
HUB = "host0"  # the hub's host in the plan of a run
# By exchange, in seconds by `time.monotonic`.
Times = Annotated[dict[int, float], Field(max_length=MOST_SPANS)]


@dataclass
class Trace:
    """The spans of a worker's last rounds, and when it sent and received its parts."""

    worker: Annotated[int, Field(ge=0)]
    spans: Spans = field(default_factory=list)
    sent_s: Times = field(default_factory=dict)
    received_s: Times = field(default_factory=dict)

    @contextmanager
    def span(self, kind: Kind, number: int, part: str) -> Iterator[None]:
        """Record the block as a span of a round."""
        start_s = time.monotonic()
        yield
        self.spans.append(Span(kind, number, part, self.worker, (), start_s, time.monotonic()))

    def forget(self, number: int, fragments: int) -> None:
        """Forget the rounds before the last ones, of which `number` is the newest."""
        first = number - NUM_TRACED
        self.spans = [span for span in self.spans if span.step > first]
        for times in (self.sent_s, self.received_s):
            for exchange in [one for one in times if one // fragments <= first]:
                del times[exchange]

    def moved(self, by_s: float) -> "Trace":
        """Return the trace by another clock."""
        sent, received = (
            {exchange: at_s + by_s for exchange, at_s in times.items()}
            for times in (self.sent_s, self.received_s)
        )
        return Trace(self.worker, [one.moved(by_s) for one in self.spans], sent, received)

    def as_json(self) -> bytes:
        """Return the trace as it travels to the hub."""
        return _TRACE.dump_json(self)


_TRACE = TypeAdapter(Trace)


@dataclass
class HubTimes:
    """When the hub received each worker's part of an exchange, and when it sent the others'."""

    received_s: dict[tuple[int, int], float] = field(default_factory=dict)  # (worker, exchange)
    taken_s: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)  # from, to
    replied_s: dict[int, float] = field(default_factory=dict)
    summed_s: dict[int, float] = field(default_factory=dict)  # the end of the hub's own outer step

    def forget(self, exchange: int) -> None:
        """Forget this exchange."""
        self.replied_s.pop(exchange, None)
        self.summed_s.pop(exchange, None)
        for times in (self.received_s, self.taken_s):
            for key in [one for one in times if one[1] == exchange]:
                del times[key]


def timeline_of(
    traces: Iterable[Trace],
    hub: HubTimes,
    devices: Mapping[int, str],
    fragments: int,
    num_rounds: int,
    origin: Origin,
) -> Timeline:
    """Return the timeline of the last rounds that all workers have told of, `num_rounds` at most.

    Rounds count from the first of them. `devices` are the names of the workers' devices.
    """
    known = list(traces)
    lasts = [max((span.step for span in one.spans), default=-1) for one in known]
    firsts = [min((span.step for span in one.spans), default=0) for one in known]
    last = min(lasts, default=-1)
    first = max([last - num_rounds + 1, *firsts], default=0)
    spans = []
    for trace in known:
        device = devices[trace.worker]
        spans += [one._replace(on=(compute_lane(device),)) for one in trace.spans]
        spans += _messages(trace, hub, device, fragments)
    on = (Resource(HUB, Lane.REDUCE),)
    for (worker, exchange), ends_s in hub.taken_s.items():
        number, part = divmod(exchange, fragments)
        if exchange in hub.replied_s:  # not one that was given up
            spans.append(Span(Kind.DECODE, number, f"{part}{TAKEN}", worker, on, *ends_s))
    for exchange, end_s in hub.summed_s.items():
        number, part = divmod(exchange, fragments)
        spans.append(Span(Kind.REDUCE, number, str(part), None, on, hub.replied_s[exchange], end_s))
    # What travels beside the first round's steps was sent before it.
    spans = [one for one in spans if (one.step, one.part) != (first, f"{0}{BESIDE}")]
    chosen = [one._replace(step=one.step - first) for one in spans if first <= one.step <= last]
    chosen.sort(key=lambda span: (span.start_s, span.end_s))
    zero_s = chosen[0].start_s if chosen else 0.0
    return Timeline((span.moved(-zero_s) for span in chosen), origin)


def _messages(trace: Trace, hub: HubTimes, device: str, fragments: int) -> Iterator[Span]:
    for exchange, sent_s in trace.sent_s.items():
        arrived_s = hub.received_s.get((trace.worker, exchange))
        replied_s, received_s = hub.replied_s.get(exchange), trace.received_s.get(exchange)
        if arrived_s is None or replied_s is None or received_s is None:
            continue  # it was lost on the way
        number, part = divmod(exchange, fragments)
        for name, lane, start_s, end_s in (
            ("up", Lane.UPLOAD, sent_s, arrived_s),
            ("down", Lane.DOWNLOAD, replied_s, received_s),
        ):
            on = (Resource(device, lane),)
            span = Span(Kind.SEND, number, f"{part}.{name}", trace.worker, on, start_s, end_s)
            yield span._replace(end_s=max(start_s, end_s))
