"""Draw the measured timeline of a split head: AlexNet on two hosts at 200 Mbit/s.

A real run with 16 images per worker and one core per host. The picture shows one step, from the end
of the body's forward to the start of its backward, with separate rows for each sub-batch.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hosts import TwoHosts

import lanes
from command import paceline
from figures import table
from paceline.core.plan import COMPUTE, Kind
from paceline.core.timeline import Span, Timeline
from paceline.record.trace import read_timeline

_RATE, _SAMPLES, _WORKERS = "200mbit", 16, 2
_DEVICE = "cpu0"
_MARGIN = 0.08  # shown before and after the head, relative to the head's duration


def measure(quick: bool) -> dict[str, Any]:
    """Return the first worker's spans of computing and exchanging during the head of a step."""
    batch, steps = _SAMPLES * _WORKERS, 6 if quick else 12
    words = ("train", "alexnet", "--data", f"synthetic:samples={batch * steps}", "--epochs", 1)
    ours = ("--strategy", "subbatch", "--workers", _WORKERS, "--batch-size", batch)
    with TemporaryDirectory() as folder, TwoHosts(_RATE) as hosts:
        waiting = ("--profile-s", 1, "--timeout", 120, "--output", folder)
        paceline(*words, *ours, *waiting, hosts=hosts, deadline_s=500.0)
        (trace,) = Path(folder).glob("*/trace.json")
        return _head_of(read_timeline(trace, "measured"))


def _head_of(timeline: Timeline) -> dict[str, Any]:
    """Return the spans around the head of one step, with a margin.

    Chooses the traced step with the shortest head, which other programs disturbed least.
    """
    steps: dict[int, list[Span]] = {}
    for lane, track in timeline.tracks.items():
        for span in track if lane.owner == _DEVICE else ():
            steps.setdefault(span.step, []).append(span)
    own = min(steps.values(), key=_length)
    first, last = _way(own)
    margin = _MARGIN * (last - first)
    start_s, end_s = first - margin, last + margin
    return {
        "stretch_s": [0.0, end_s - start_s],
        "head_s": [margin, last - start_s],
        "spans": [
            [span.sub_batch, span.kind.value, span.start_s - start_s, span.end_s - start_s]
            for span in own
            if span.end_s > start_s and span.start_s < end_s
        ],
    }


def _way(spans: Sequence[Span]) -> tuple[float, float]:
    """Return the start of a step's first sub-batch and the end of its last."""
    passes = [span for span in spans if span.sub_batch is not None]
    return min(span.start_s for span in passes), max(span.end_s for span in passes)


def _length(spans: Sequence[Span]) -> float:
    first, last = _way(spans)
    return last - first


def drawn(figures: dict[str, Any]) -> str:
    """Return the picture as SVG."""
    start_s, end_s = figures["stretch_s"]
    title = "subbatch, measured: the head of AlexNet, 16 images a worker, 200 Mbit/s, one of two"
    shown = f"{title} workers: {1e3 * (end_s - start_s):.0f} ms"
    return lanes.picture(shown, list(_rows(_spans(figures))), start_s, end_s)


def _rows(spans: Sequence[Span]) -> Iterator[lanes.Row]:
    for does, computes in ((f"{_DEVICE} computes", True), ("exchange", False)):
        for number in (None, *range(_WORKERS)):
            where = "the body" if number is None else f"sub-batch {number}"
            own = [s for s in spans if (s.kind in COMPUTE) == computes and s.sub_batch == number]
            if own:
                yield f"{does}: {where}", own


def _spans(figures: dict[str, Any]) -> list[Span]:
    return [
        Span(Kind(kind), 0, "", None, (), start, end, sub_batch)
        for sub_batch, kind, start, end in figures["spans"]
    ]


def text(figures: dict[str, Any]) -> str:
    """Return a table of computing time, exchange time, and their overlap."""
    first, last = figures["head_s"]
    inside = [span for span in _spans(figures) if span.sub_batch is not None]
    computed = [span for span in inside if span.kind in COMPUTE]
    exchanged = [span for span in inside if span.kind not in COMPUTE]
    both = sum(_overlap(one, other) for one in computed for other in exchanged)
    seconds = {
        "the way through the head": last - first,
        "computing": sum(span.duration_s for span in computed),
        "exchanges under way": sum(span.duration_s for span in exchanged),
        "of these beside computing": both,
    }
    rows = [(name, f"{1e3 * value:.0f}") for name, value in seconds.items()]
    return table("A step in the head, worker 0", ("", "ms"), rows)


def _overlap(one: Span, other: Span) -> float:
    return max(0.0, min(one.end_s, other.end_s) - max(one.start_s, other.start_s))
