"""Timelines as Chrome-trace JSON, which Perfetto opens: one track per resource.

Every timeline is a process of the trace for each owner of resources, every resource a thread of it.
The file is read back as it was written, so that a report needs nothing else.
"""

import json
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

from paceline.core.errors import InvalidInput
from paceline.core.plan import Kind, Lane, Resource, TaskId
from paceline.core.timeline import Origin, Span, Timeline

_US = 1e6  # Chrome traces count microseconds
_FIELDS = ("step", "part", "worker", "sub_batch", "num_samples")


def write_trace(path: Path, timelines: Iterable[Timeline]) -> None:
    """Write the timelines into one file, side by side."""
    process = count(1)
    events = [event for timeline in timelines for event in _events(timeline, process)]
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


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
            # Rounded to nanoseconds, start and end alike, so that neighbours do not overlap by a
            # rounding.
            start, end = round(span.start_s * _US, 3), round(span.end_s * _US, 3)
            fields = {field: getattr(span, field) for field in _FIELDS}
            yield {
                "ph": "X",
                "name": span.name,
                "cat": span.kind.value,
                "ts": start,
                "dur": round(end - start, 3),
                "args": {
                    "origin": timeline.origin,
                    **fields,
                    "owner": owner,
                    "lane": resource.lane,
                },
                **place,
            }


def read_trace(path: Path) -> dict[Origin, Timeline]:
    """Return the timelines of a file that `write_trace` wrote, by origin.

    Raises InvalidInput that names the file if it is missing or is not such a file.
    """
    found: dict[Origin, dict[TaskId, Span]] = {}
    try:
        for event in json.loads(path.read_text())["traceEvents"]:
            if event["ph"] != "X":
                continue
            args, start_s = event["args"], event["ts"] / _US
            span = Span(
                kind=Kind(event["cat"]),
                on=(Resource(args["owner"], Lane(args["lane"])),),
                start_s=start_s,
                end_s=start_s + event["dur"] / _US,
                **{field: args[field] for field in _FIELDS},
            )
            # A slice of one resource; the span holds all of them.
            spans = found.setdefault(Origin(args["origin"]), {})
            known = spans.get(span.id)
            spans[span.id] = span if known is None else known._replace(on=known.on + span.on)
    except OSError as error:
        raise InvalidInput(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidInput(f"{path}: not a trace that Paceline wrote ({error!r})") from None
    return {origin: Timeline(spans.values(), origin) for origin, spans in found.items()}


def read_timeline(path: Path, origin: Origin) -> Timeline:
    """Return one of the timelines of a file; InvalidInput names the file if it is not there."""
    timelines = read_trace(path)
    if origin not in timelines:
        raise InvalidInput(f"{path}: has no {origin} timeline")
    return timelines[origin]
