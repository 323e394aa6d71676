"""One timeline of all ranks: their clocks brought together, their collectives joined."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from paceline.core.cost import exchange_lane
from paceline.core.timeline import Origin, Span, Timeline
from paceline.links.group import Group

_NUM_PINGS = 32
_SPANS = TypeAdapter(list[Span])


@dataclass(frozen=True)
class ClockOffset:
    """How far this rank's clock is ahead of rank 0's, and how wrong that may be at the most."""

    ahead_s: float
    error_s: float


def gather_timeline(
    spans: Sequence[Span], offset: ClockOffset, group: Group, origin: Origin = "measured"
) -> Timeline:
    """Return one timeline of all ranks' spans, on every rank. Its first span starts at zero.

    `offset` is that of this rank's clock when the spans were recorded. All ranks must call it
    together.
    """
    own = [_shift(span, -offset.ahead_s) for span in spans]
    rows = group.gather(_SPANS.dump_python(own, mode="json"))
    return merge([_SPANS.validate_python(row) for row in rows], origin)


def merge(ranks: Iterable[Sequence[Span]], origin: Origin) -> Timeline:
    """Return one timeline of spans that share a clock.

    Spans of one name are one collective. It starts when the last rank has joined it, for what the
    others do until then is waiting, and ends when the first rank has its result: what holds up a
    rank after that is its own.
    """
    merged: dict[str, Span] = {}
    for spans in ranks:
        for span in spans:
            other = merged.get(span.name)
            merged[span.name] = span if other is None else _join(other, span)
    in_turn = _in_turn(merged.values())
    start = min((span.start_s for span in in_turn), default=0.0)
    return Timeline((_shift(span, -start) for span in in_turn), origin)


def _join(one: Span, other: Span) -> Span:
    start_s = max(one.start_s, other.start_s)
    return one._replace(
        on=tuple(dict.fromkeys((*one.on, *other.on))),
        start_s=start_s,
        end_s=max(start_s, min(one.end_s, other.end_s)),
    )


def _shift(span: Span, by_s: float) -> Span:
    return span._replace(start_s=span.start_s + by_s, end_s=span.end_s + by_s)


def _in_turn(spans: Iterable[Span]) -> list[Span]:
    """Let transfers on one lane follow one another.

    A backend may have several in flight. They share the wire, so that a transfer's span is the time
    which it adds after the one before it.
    """
    result: list[Span] = []
    free: dict[str, float] = {}
    for span in sorted(spans, key=lambda span: (span.start_s, span.end_s)):
        lanes = [r.owner for r in span.on if r == exchange_lane(r.owner)]
        start = max([span.start_s, *(free.get(lane, span.start_s) for lane in lanes)])
        end = max(start, span.end_s)
        free.update(dict.fromkeys(lanes, end))
        result.append(span._replace(start_s=start, end_s=end))
    return result


def clock_offset(group: Group) -> ClockOffset:
    """Return how far this rank's monotonic clock is ahead of rank 0's.

    Ranks on one kernel share it, and have no offset; the others measure theirs. All ranks must
    call it together.
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
    """Exchange messages between rank 0 and `rank`, which both call this, and compare clocks.

    The answer to a message was written between its sending and its return: the fastest round trip
    leaves the least doubt, half of itself. Both ranks return the same offset.
    """
    best = torch.tensor([0.0, float("inf")], dtype=torch.float64)
    answer = torch.zeros(1, dtype=torch.float64)
    for _ in range(_NUM_PINGS):
        if group.rank == 0:
            sent = now()
            dist.send(answer, rank, group.control)
            dist.recv(answer, rank, group.control)
            there, back = float(answer), now()
            error = (back - sent) / 2
            if error < float(best[1]):
                best[0], best[1] = there - (sent + back) / 2, error
        else:
            dist.recv(answer, 0, group.control)
            answer.fill_(now())
            dist.send(answer, 0, group.control)
    if group.rank == 0:
        dist.send(best, rank, group.control)
    else:
        dist.recv(best, 0, group.control)
    return ClockOffset(float(best[0]), float(best[1]))
