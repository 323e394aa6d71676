"""Merge the spans of all ranks into one timeline, with aligned clocks."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from paceline.core.cost import exchange_lane
from paceline.core.plan import TaskId
from paceline.core.timeline import Origin, Span, Timeline
from paceline.links.group import Group

_NUM_PINGS = 32
_SPANS = TypeAdapter(list[Span])


class ClockOffset(NamedTuple):
    """How many seconds a rank's clock is ahead of rank 0's, and the largest possible error."""

    ahead_s: float
    error_s: float


def gather_timeline(
    spans: Sequence[Span], offset: ClockOffset, group: Group, origin: Origin = Origin.MEASURED
) -> Timeline:
    """Gather the spans of all ranks into one timeline that starts at 0 s.

    All ranks must call this together; each gets the timeline. `offset`: the `clock_offset` of this
    rank, measured shortly before or after the recording.
    """
    own = [span.moved(-offset.ahead_s) for span in spans]
    rows = group.gather(_SPANS.dump_python(own, mode="json"))
    return merge([_SPANS.validate_python(row) for row in rows], origin)


def merge(ranks: Iterable[Sequence[Span]], origin: Origin) -> Timeline:
    """Merge each rank's spans into one timeline; all times must be of the same clock.

    Spans of several ranks with the same `id` are one collective. The collective starts when the
    last rank joins, and ends when the first rank has the result. Ranks that recorded a later end
    were busy with other work.
    """
    merged: dict[TaskId, Span] = {}
    for spans in ranks:
        for span in spans:
            if (other := merged.get(span.id)) is not None:
                start_s = max(other.start_s, span.start_s)
                end_s = max(start_s, min(other.end_s, span.end_s))
                on = tuple(dict.fromkeys((*other.on, *span.on)))
                span = other._replace(on=on, start_s=start_s, end_s=end_s)
            merged[span.id] = span
    # Concurrent exchanges of a device share its link, so let each begin when the previous one ends.
    in_turn: list[Span] = []
    free: dict[str, float] = {}
    for span in sorted(merged.values(), key=lambda span: (span.start_s, span.end_s)):
        # Only exchange lanes can have overlapping spans.
        lanes = [r.owner for r in span.on if r == exchange_lane(r.owner)]
        start = max([span.start_s, *(free.get(lane, span.start_s) for lane in lanes)])
        end = max(start, span.end_s)
        free.update(dict.fromkeys(lanes, end))
        in_turn.append(span._replace(start_s=start, end_s=end))
    first = min((span.start_s for span in in_turn), default=0.0)
    return Timeline((span.moved(-first) for span in in_turn), origin)


def clock_offset(group: Group) -> ClockOffset:
    """Measure how far this rank's monotonic clock is ahead of rank 0's clock.

    All ranks must call this together. Ranks on the same host as rank 0 use the same clock, so their
    offset is zero.
    """
    offset = ClockOffset(0.0, 0.0)
    for member in group.members:
        if member.boot_id != group.members[0].boot_id and group.rank in (0, member.rank):
            measured = measure_offset(group, member.rank)
            offset = measured if group.rank == member.rank else offset
    return offset


def measure_offset(
    group: Group, rank: int, now: Callable[[], float] = time.monotonic
) -> ClockOffset:
    """Measure how far `rank`'s clock is ahead of rank 0's; both ranks must call this together."""
    answer, found = torch.zeros(1, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)

    def ask() -> float:
        dist.send(answer, rank, group.control)
        dist.recv(answer, rank, group.control)
        return float(answer)

    if group.rank == 0:
        lead = lead_of(ask, now)
        dist.send(torch.tensor([*lead], dtype=torch.float64), rank, group.control)
        return lead
    for _ in range(_NUM_PINGS):
        dist.recv(answer, 0, group.control)
        answer.fill_(now())
        dist.send(answer, 0, group.control)
    dist.recv(found, 0, group.control)
    return ClockOffset(float(found[0]), float(found[1]))


def lead_of(ask: Callable[[], float], now: Callable[[], float] = time.monotonic) -> ClockOffset:
    """Measure how far a remote clock is ahead of the local clock.

    `ask()` requests the remote time over the network; `now()` reads the local clock. The error is
    at most half of a round trip, so the fastest of several round trips is used.
    """
    trips = []
    for _ in range(_NUM_PINGS):
        sent_s, there_s, back_s = now(), ask(), now()
        trips.append(((back_s - sent_s) / 2, there_s - (sent_s + back_s) / 2))
    error_s, ahead_s = min(trips)
    return ClockOffset(ahead_s, error_s)
