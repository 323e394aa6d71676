"""The timeline of traced steps: both ends' spans, and the messages between them."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain

from paceline.core.cost import compute_lane, download_lane, upload_lane
from paceline.core.plan import COMPUTE, Kind, Resource, task_name
from paceline.core.timeline import Span, Timeline, intersection, length, union
from paceline.strategies.wheel.split import TO_HUB, Message, Purpose
from paceline.strategies.wheel.trace import Record

_TOGETHER = (Purpose.LABELS, Purpose.ACTIVATIONS)  # in one message, labels first


def timeline_of(
    record: Record, devices: Mapping[int, str], sent: Mapping[Purpose, Message]
) -> Timeline:
    """Return the timeline, from zero on. `devices` are the workers', `sent` what a step sends.

    Messages that are on their way at once share the wire: the span of each is the time that it adds
    after the one that came before it.
    """
    spans = [*record.spans, *_messages(record, devices, sent)]
    start_s = min((span.start_s for span in spans), default=0.0)
    moved = (
        span._replace(start_s=span.start_s - start_s, end_s=span.end_s - start_s)
        for span in sorted(spans, key=lambda span: (span.start_s, span.end_s))
    )
    return Timeline(moved, "measured")


def _messages(
    record: Record, devices: Mapping[int, str], sent: Mapping[Purpose, Message]
) -> Iterator[Span]:
    left = {leaf[:3]: leaf.at_s for leaf in record.left}
    whole = sum(sent[purpose].nbytes for purpose in _TOGETHER)
    lanes: dict[Resource, list[Span]] = defaultdict(list)
    for purpose_name, worker, step, end_s in record.came:
        purpose, device = Purpose(purpose_name), devices[worker]
        start_s = left.get((purpose_name, worker, step))
        if start_s is None:  # its sender was lost
            continue
        end_s = max(start_s, end_s)
        border_s = start_s + (end_s - start_s) * sent[Purpose.LABELS].nbytes / whole
        if purpose is Purpose.LABELS:
            end_s = border_s
        elif purpose is Purpose.ACTIVATIONS:
            start_s = border_s
        lane = upload_lane(device) if purpose in TO_HUB else download_lane(device)
        name = task_name(step, Kind.SEND, purpose, worker)
        lanes[lane].append(Span(name, Kind.SEND, (lane,), start_s, end_s, purpose.value))
    return chain.from_iterable(map(_in_turn, lanes.values()))


def _in_turn(spans: Iterable[Span]) -> Iterator[Span]:
    free_s = float("-inf")
    for span in sorted(spans, key=lambda span: (span.end_s, span.start_s)):
        yield span._replace(start_s=max(span.start_s, min(free_s, span.end_s)))
        free_s = span.end_s


def idle_shares(timeline: Timeline, devices: Iterable[str]) -> dict[str, float]:
    """Return the share of the time in which each device computes nothing, while all its lanes do.

    That is from when the last of its workers begins until the first one ends: before and after, the
    device is busy with steps that were not traced.
    """
    shares = {}
    for device in devices:
        workers: dict[str, list[Span]] = defaultdict(list)
        for span in timeline.tracks.get(compute_lane(device), ()):
            if span.kind in COMPUTE:
                workers[span.name.rpartition("@")[2]].append(span)
        start_s = max((min(span.start_s for span in own) for own in workers.values()), default=0.0)
        end_s = min((max(span.end_s for span in own) for own in workers.values()), default=0.0)
        if end_s > start_s:
            busy = union(chain.from_iterable(workers.values()))
            shares[device] = 1 - length(intersection(busy, [(start_s, end_s)])) / (end_s - start_s)
    return shares
