"""Write and read timelines as Chrome-trace JSON, which Perfetto opens.

Each device, host or link of a timeline is shown as a process, and each of its resources as a
thread. Traces contain all fields of spans, so that reports can be made from trace files.
"""

import json
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, FailFast, Field, TypeAdapter

from paceline.core.errors import InvalidInput
from paceline.core.plan import Kind, Lane, Resource, TaskId
from paceline.core.reading import read_record
from paceline.core.timeline import Origin, Span, Timeline
from paceline.links.files import limits, read_file, write_text

_US = 1e6  # microseconds per second, because Chrome traces have times in microseconds
_LONGEST_US = 3.2e15  # a century: later times in a file are errors
_Name = Annotated[str, Field(max_length=1000)]
_FIELDS = ("step", "part", "worker", "sub_batch", "num_samples")


def write_trace(path: Path, timelines: Iterable[Timeline]) -> None:
    """Write timelines, such as a measured and a predicted one, into one file."""
    process = count(1)
    events = [event for timeline in timelines for event in _events(timeline, process)]
    write_text(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _events(timeline: Timeline, process: Iterator[int]) -> Iterator[dict[str, Any]]:
    pids: dict[str, int] = {}
    for tid, (resource, track) in enumerate(timeline.tracks.items(), start=1):
        owner, label = resource.owner, {"ph": "M"}
        if owner not in pids:
            pids[owner] = next(process)
            name = {"name": f"{timeline.origin} {owner}"}
            yield label | {"name": "process_name", "pid": pids[owner], "tid": 0, "args": name}
        place = {"pid": pids[owner], "tid": tid}
        yield label | {"name": "thread_name", **place, "args": {"name": str(resource)}}
        for span in track:
            # Round start and end, not the duration, so that adjacent spans do not overlap.
            start, end = round(span.start_s * _US, 3), round(span.end_s * _US, 3)
            fields = {field: getattr(span, field) for field in _FIELDS}
            on = {"origin": timeline.origin, "owner": owner, "lane": resource.lane}
            what = {"ph": "X", "name": span.name, "cat": span.kind.value}
            when = {"ts": start, "dur": round(end - start, 3)}
            yield {**what, **when, "args": on | fields, **place}


class _Args(BaseModel):
    origin: Origin
    owner: _Name
    lane: Lane
    step: Annotated[int, Field(ge=0, lt=2**31)]
    part: _Name
    worker: Annotated[int, Field(ge=0, lt=2**31)] | None
    sub_batch: Annotated[int, Field(ge=0, lt=2**31)] | None
    num_samples: Annotated[int, Field(ge=0, lt=2**53)]


class _Slice(BaseModel):
    """A Chrome trace event: a span, shown on one of the resources that it uses."""

    ph: Literal["X"]
    cat: Kind
    ts: Annotated[float, Field(ge=-_LONGEST_US, le=_LONGEST_US, allow_inf_nan=False)]
    dur: Annotated[float, Field(ge=0, le=_LONGEST_US, allow_inf_nan=False)]
    args: _Args


class _Label(BaseModel):
    """A Chrome trace event that names a process or thread."""

    ph: Literal["M"]


class _Trace(BaseModel):
    events: Annotated[
        list[Annotated[_Slice | _Label, Field(discriminator="ph")]],
        Field(alias="traceEvents"),
        FailFast(),  # stops at the first error: errors for a million events would use much memory
    ]


_TRACE = TypeAdapter(_Trace)


def read_trace(path: Path) -> dict[Origin, Timeline]:
    """Read a file's timelines by origin: measured, predicted or rehearsed (with emulated layers).

    Raises InvalidInput if the file is missing or invalid.
    """
    found: dict[Origin, dict[TaskId, tuple[Span, list[Resource]]]] = {}
    trace = read_record(_TRACE, read_file(path, limits.TRACE), str(path))
    for event in trace.events:
        if event.ph != "X":
            continue
        args, start_s = event.args, event.ts / _US
        on = Resource(args.owner, args.lane)
        span = Span(
            kind=event.cat,
            on=(on,),
            start_s=start_s,
            end_s=start_s + event.dur / _US,
            **{field: getattr(args, field) for field in _FIELDS},
        )
        # The file has one event for each resource of a span: collect the resources.
        spans = found.setdefault(args.origin, {})
        spans.setdefault(span.id, (span, []))[1].append(on)
    return {
        origin: Timeline((span._replace(on=tuple(on)) for span, on in spans.values()), origin)
        for origin, spans in found.items()
    }


def read_timeline(path: Path, origin: Origin) -> Timeline:
    """Read a file's timeline of one origin, such as measured; InvalidInput if there is none."""
    timelines = read_trace(path)
    if origin not in timelines:
        raise InvalidInput(str(path), f"has no {origin} timeline")
    return timelines[origin]
