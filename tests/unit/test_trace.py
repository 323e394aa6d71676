"""Timelines of ranks: merged, written as traces, and read by Paceline and Perfetto."""

import json
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from absent_ranks import group_of
from paceline.core.cost import compute_lane, exchange_lane
from paceline.core.plan import Kind
from paceline.core.timeline import Span, Timeline
from paceline.links.group import Group
from paceline.record import merge as module
from paceline.record.merge import ClockOffset, clock_offset, gather_timeline, merge
from paceline.record.trace import read_trace, write_trace
from refusals import refused

NANOSECOND = 1.001e-9  # with a margin for rounding errors

LANES = [lane(owner) for owner in ("cpu0", "cpu1") for lane in (compute_lane, exchange_lane)]
spans = st.builds(
    lambda kind, on, start, duration, **fields: Span(
        kind, on=tuple(on), start_s=start, end_s=start + duration, **fields
    ),
    st.sampled_from(Kind),
    st.lists(st.sampled_from(LANES), min_size=1, max_size=4, unique=True),
    st.floats(0, 1e4),
    st.floats(0, 100),
    step=st.integers(0, 3),
    part=st.text(max_size=5),
    worker=st.none() | st.integers(0, 3),
    sub_batch=st.none() | st.integers(0, 3),
    num_samples=st.integers(0, 8),
)
rows = st.lists(spans, max_size=8, unique_by=lambda span: span.id)


@given(rows, rows)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_written_is_read_back_to_a_nanosecond(tmp_path: Path, left, right):
    path = tmp_path / "trace.json"
    written = {"predicted": Timeline(left, "predicted"), "measured": Timeline(right, "measured")}
    write_trace(path, written.values())
    read = read_trace(path)
    assert {origin for origin, one in written.items() if one.spans} == set(read)
    for origin, again in read.items():
        assert again.origin == origin
        by_id = {span.id: span for span in again.spans}
        assert len(by_id) == len(again.spans) == len(written[origin].spans)
        for span in written[origin].spans:
            other = by_id[span.id]
            assert (other.num_samples, set(other.on)) == (span.num_samples, set(span.on))
            assert other.start_s == pytest.approx(span.start_s, abs=NANOSECOND, rel=0)
            assert other.end_s == pytest.approx(span.end_s, abs=NANOSECOND, rel=0)


COMPUTE, ZERO, ONE = compute_lane("cpu0"), exchange_lane("cpu0"), exchange_lane("cpu1")
SMALL = [
    Span(Kind.FORWARD, 0, "a", 0, (COMPUTE,), 0.0, 1.5e-3),
    Span(Kind.REDUCE, 0, "0", None, (ZERO, ONE), 1.5e-3, 2e-3),
]


@pytest.fixture
def events(tmp_path: Path) -> list[dict]:
    path = tmp_path / "trace.json"
    write_trace(path, [Timeline(SMALL, "predicted"), Timeline(SMALL, "measured")])
    return json.loads(path.read_text())["traceEvents"]


def test_slices_are_complete_events_in_microseconds_on_labelled_tracks(events):
    assert {event["ph"] for event in events} == {"X", "M"}
    labels = {
        (one["name"], one["pid"], one["tid"] if one["name"] == "thread_name" else None): one["args"]
        for one in events
        if one["ph"] == "M"
    }
    slices = []
    for event in events:
        if event["ph"] == "X":
            pid, tid = event["pid"], event["tid"]
            kinds = ("process_name", pid, None), ("thread_name", pid, tid)
            track = tuple(labels[kind]["name"] for kind in kinds)
            slices.append((*track, *(event[key] for key in ("name", "cat", "ts", "dur"))))
    # The collective is on both of its tracks, in each of the two timelines.
    assert sorted(slices) == sorted(
        (f"{origin} {lane.owner}", str(lane), *what)
        for origin in ("predicted", "measured")
        for lane, what in (
            (COMPUTE, ("s0/forward[a]@worker0", "forward", 0, 1500)),
            *((lane, ("s0/reduce[0]", "reduce", 1500, 500)) for lane in (ZERO, ONE)),
        )
    )


def test_rounding_makes_no_neighbours_overlap(tmp_path):
    path = tmp_path / "trace.json"
    cuts = pairwise(i / 3 + 1e-10 * i for i in range(200))
    row = [Span(Kind.FORWARD, i, "", None, (COMPUTE,), *ends) for i, ends in enumerate(cuts)]
    write_trace(path, [Timeline(row, "measured")])
    slices = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    for one, other in pairwise(slices):
        # Perfetto counts whole nanoseconds.
        assert round(1000 * one["ts"]) + round(1000 * one["dur"]) == round(1000 * other["ts"])


DAMAGED = [
    *({"args": None}, {"args": {}}, {"cat": "sleep"}, {"ts": "soon"}, {"dur": None}),
    {"args": {"origin": "guessed", "part": "", "owner": "cpu0", "lane": "compute"}},
]
OTHERS = [b"", b"{", b"[]", b"3", b"{}", b'{"traceEvents": [[]]}', b'{"traceEvents": 3}', b"\xff"]


@pytest.mark.parametrize("content", [*DAMAGED, *OTHERS])
def test_an_invalid_trace_is_refused_with_its_path(tmp_path, events, content):
    path = tmp_path / "other.json"
    if isinstance(content, dict):
        good = next(event for event in events if event["ph"] == "X")
        content = json.dumps({"traceEvents": [good | content]}).encode()
    path.write_bytes(content)
    with refused(path):
        read_trace(path)


def reduction(rank: int, start: float, end: float, part: str = "0") -> Span:
    on = (exchange_lane(f"cpu{rank}"),)
    return Span(Kind.REDUCE, 0, part, None, on, start, end)


def computation(rank: int, start: float, end: float) -> Span:
    return Span(Kind.FORWARD, 0, "a", rank, (compute_lane(f"cpu{rank}"),), start, end)


def times(spans) -> list[tuple[str, float, float]]:
    return [(span.name, span.start_s, span.end_s) for span in spans]


def test_a_collective_runs_from_the_last_join_to_the_first_result():
    ranks = [[reduction(0, 0, 9)], [reduction(1, 3, 8)], [reduction(2, 1, 7)]]
    (span,) = merge(ranks, "measured").spans
    assert (span.start_s, span.end_s) == (0, 4)  # from 3 to 7 on the ranks' clock
    assert set(span.on) == {exchange_lane(f"cpu{rank}") for rank in range(3)}
    # Durations are never negative, even if rank 1 seems to join after rank 0 has left.
    (span,) = merge([[reduction(0, 0, 2)], [reduction(1, 2.5, 4)]], "measured").spans
    assert span.duration_s == 0


def test_overlapping_transfers_follow_one_another_and_move_no_computation():
    ends = ((1, 5), (2, 4), (3, 8), (9, 10))
    rank = [reduction(0, *one, str(part)) for part, one in enumerate(ends)]
    # The second adds nothing to the first, the third adds 3 s, and the fourth is alone.
    assert [one[1:] for one in times(merge([rank], "measured").spans)] == [
        *((0, 4), (4, 4), (4, 7), (8, 9))
    ]
    merged = merge([[computation(0, 0, 6), reduction(0, 2, 4)]], "measured")
    assert times(merged.spans) == [("s0/forward[a]@worker0", 0, 6), ("s0/reduce[0]", 2, 4)]
    assert merge([[], []], "rehearsed").spans == ()


def test_an_exchange_waits_for_the_previous_ones_on_all_its_lanes():
    """Of three in turn, the second is on the lane of rank 1 only, and the others are on both."""
    both = {"0": (0, 5), "2": (7, 9)}
    ranks = [[reduction(rank, *ends, part) for part, ends in both.items()] for rank in range(2)]
    ranks[1].append(reduction(1, 3, 8, "1"))
    merged = merge(ranks, "measured")
    expected = [("s0/reduce[0]", 0, 5), ("s0/reduce[1]", 5, 8), ("s0/reduce[2]", 8, 9)]
    assert sorted(times(merged.spans)) == expected


class Connected(Group):
    """A rank whose `gather` returns the values of earlier ranks and its own."""

    sent: ClassVar[list] = []

    def gather(self, value):
        self.sent.append(value)
        return list(self.sent)


@pytest.mark.parametrize("ahead_s", [-1000.0, 0.25, 5000.0])
def test_clock_offsets_between_ranks_are_removed(ahead_s: float):
    Connected.sent.clear()
    for rank, ahead in ((0, 0.0), (1, ahead_s)):
        own = [
            reduction(rank, 10 + rank + ahead, 20 + rank + ahead),
            computation(rank, 8 + ahead, 9 + ahead),
        ]
        group = group_of(rank, 2, boot_ids="ab", kind=Connected)
        timeline = gather_timeline(own, ClockOffset(ahead, 1e-6), group)
    own = [(f"s0/forward[a]@worker{rank}", 0, 1) for rank in range(2)]
    assert times(timeline.spans) == [*own, ("s0/reduce[0]", 3, 12)]
    assert timeline.origin == "measured"


@pytest.mark.parametrize(
    ("rank", "measures", "own"), [(0, [2, 3], 0.0), (1, [], 0.0), (2, [2], 2.0), (3, [3], 3.0)]
)
def test_only_ranks_on_another_kernel_have_an_offset(monkeypatch, rank, measures, own):
    asked = []

    def measure(group: Group, other: int) -> ClockOffset:
        asked.append(other)
        return ClockOffset(float(other), 1e-6)

    monkeypatch.setattr(module, "measure_offset", measure)
    offset = clock_offset(group_of(rank, 4, boot_ids="aabc"))
    assert (asked, offset.ahead_s) == (measures, own)
