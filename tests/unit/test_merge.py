"""Timelines of ranks merged: their clocks brought together, collectives and transfers cut."""

from itertools import pairwise
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groups import group_of
from paceline.core.cost import compute_lane, exchange_lane
from paceline.core.plan import Kind
from paceline.core.timeline import Span
from paceline.links.group import Group
from paceline.record import merge as module
from paceline.record.merge import ClockOffset, clock_offset, gather_timeline, merge


def reduction(rank: int, start: float, end: float, part: str = "0") -> Span:
    on = (exchange_lane(f"cpu{rank}"),)
    return Span(Kind.REDUCE, 0, part, None, on, start, end)


def computation(rank: int, start: float, end: float) -> Span:
    return Span(Kind.FORWARD, 0, "a", rank, (compute_lane(f"cpu{rank}"),), start, end)


def times(spans) -> list[tuple[str, float, float]]:
    return [(span.name, span.start_s, span.end_s) for span in spans]


def test_a_collective_runs_from_the_last_join_to_the_first_result():
    spans = merge(
        [[reduction(0, 0, 9)], [reduction(1, 3, 8)], [reduction(2, 1, 7)]], "measured"
    ).spans
    assert [(span.start_s, span.end_s) for span in spans] == [(0, 4)]  # 3 to 7 of their clock
    assert set(spans[0].on) == {exchange_lane(f"cpu{rank}") for rank in range(3)}
    # It never ends before it starts, even if a clock says that rank 1 joins after rank 0 has left.
    (span,) = merge([[reduction(0, 0, 2)], [reduction(1, 2.5, 4)]], "measured").spans
    assert span.duration_s == 0


def test_transfers_in_flight_together_follow_one_another_and_move_no_computation():
    rank = [reduction(0, 1, 5, "0"), reduction(0, 2, 4, "1"), reduction(0, 3, 8, "2")]
    merged = merge([[*rank, reduction(0, 9, 10, "3")]], "measured")
    # What the second adds to the first is nothing, the third three seconds; the fourth is alone.
    assert times(merged.spans) == [
        ("s0/reduce[0]", 0, 4),
        ("s0/reduce[1]", 4, 4),
        ("s0/reduce[2]", 4, 7),
        ("s0/reduce[3]", 8, 9),
    ]
    merged = merge([[computation(0, 0, 6), reduction(0, 2, 4)]], "measured")
    assert times(merged.spans) == [("s0/forward[a]@worker0", 0, 6), ("s0/reduce[0]", 2, 4)]
    assert merge([[], []], "rehearsed").spans == ()


moments = st.integers(0, 40)


@st.composite
def ranks(draw) -> list[list[Span]]:
    """Spans of one to three ranks: collectives that some of them join, and work of their own."""
    rows = []
    for rank in range(draw(st.integers(1, 3))):
        row = []
        for part in draw(st.sets(st.integers(0, 4))):
            start = draw(moments)
            row.append(reduction(rank, start, start + draw(moments), str(part)))
        start = draw(moments)
        rows.append([*row, computation(rank, start, start + draw(moments))])
    return rows


@given(ranks())
def test_no_span_is_lost_and_none_overlaps_on_an_exchange_lane(rows: list[list[Span]]):
    merged = merge(rows, "measured")
    names = [span.name for span in merged.spans]
    assert sorted(names) == sorted({span.name for row in rows for span in row})
    assert merged.start_s == 0
    assert all(span.duration_s >= 0 for span in merged.spans)
    for resource, track in merged.tracks.items():
        if resource == exchange_lane(resource.owner):
            assert all(one.end_s <= other.start_s for one, other in pairwise(track))
    for span in merged.spans:
        lanes = {lane for row in rows for one in row if one.name == span.name for lane in one.on}
        assert set(span.on) == lanes


class Connected(Group):
    """A rank whose `gather` gives what the ranks before it have sent, and its own."""

    sent: ClassVar[list] = []

    def gather(self, value):
        self.sent.append(value)
        return list(self.sent)


@pytest.mark.parametrize("ahead_s", [-1000.0, 0.25, 5000.0])
def test_ranks_whose_clocks_disagree_are_brought_together(ahead_s: float):
    Connected.sent.clear()
    for rank, ahead in ((0, 0.0), (1, ahead_s)):
        own = [
            reduction(rank, 10 + rank + ahead, 20 + rank + ahead),
            computation(rank, 8 + ahead, 9 + ahead),
        ]
        offset = ClockOffset(ahead, 1e-6)
        timeline = gather_timeline(own, offset, group_of(rank, 2, boot_ids="ab", kind=Connected))
    assert times(timeline.spans) == [
        ("s0/forward[a]@worker0", 0, 1),
        ("s0/forward[a]@worker1", 0, 1),
        ("s0/reduce[0]", 3, 12),
    ]
    assert timeline.origin == "measured"


@pytest.mark.parametrize(
    ("rank", "measures", "own"),
    [(0, [2, 3], 0.0), (1, [], 0.0), (2, [2], 2.0), (3, [3], 3.0)],
)
def test_only_ranks_on_another_kernel_have_an_offset(monkeypatch, rank, measures, own):
    asked = []

    def measure(group: Group, other: int) -> ClockOffset:
        asked.append(other)
        return ClockOffset(float(other), 1e-6)

    monkeypatch.setattr(module, "measure_offset", measure)
    offset = clock_offset(group_of(rank, 4, boot_ids="aabc"))
    assert (asked, offset.ahead_s) == (measures, own)
