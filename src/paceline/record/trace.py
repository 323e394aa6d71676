"""Timelines as Chrome-trace JSON, which Perfetto opens: one track per resource.

Every timeline is a process of the trace for each owner of resources, every resource a thread of it.
The file is read back as it was written, so that a report needs nothing else.
"""

import json
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, get_args

from paceline.core.errors import InvalidInput
from paceline.core.plan import Kind, Resource
from paceline.core.timeline import Origin, Span, Timeline

_US = 1e6  # Chrome traces count microseconds


def write_trace(path: Path, timelines: Iterable[Timeline]) -> None:
    """Write the timelines into one file, side by side."""
    process = count(1)
    events = [event for timeline in timelines for event in _events(timeline, process)]
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _events(timeline: Timeline, process: Iterator[int]) -> Iterator[dict[str, Any]]:
    pids: dict[str, int] = {}
    for tid, (resource, track) in enumerate(timeline.tracks.items(), start=1):
        if resource.owner not in pids:
            pids[resource.owner] = next(process)
            name = f"{timeline.origin} {resource.owner}"
            yield _label("process_name", pids[resource.owner], 0, name)
        yield _label("thread_name", pids[resource.owner], tid, str(resource))
        for span in track:
            yield _slice(span, resource, timeline.origin) | {
                "pid": pids[resource.owner],
                "tid": tid,
            }


def _slice(span: Span, resource: Resource, origin: Origin) -> dict[str, Any]:
    # Rounded to nanoseconds, start and end alike, so that neighbours do not overlap by a rounding.
    start, end = round(span.start_s * _US, 3), round(span.end_s * _US, 3)
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.kind.value,
        "ts": start,
        "dur": round(end - start, 3),
        "args": {
            "origin": origin,
            "part": span.part,
            "owner": resource.owner,
            "lane": resource.lane,
        },
    }


def _label(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def read_trace(path: Path) -> dict[Origin, Timeline]:
    """Return the timelines of a file that `write_trace` wrote, by origin.

    Raises InvalidInput that names the file if it is missing or is not such a file.
    """
    try:
        events = json.loads(path.read_text())["traceEvents"]
        spans: dict[Origin, dict[str, Span]] = {}
        for event in events:
            if event["ph"] == "X":
                _add(spans.setdefault(_origin(event), {}), event)
    except OSError as error:
        raise InvalidInput(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidInput(f"{path}: not a trace that Paceline wrote ({error!r})") from None
    return {origin: Timeline(spans[origin].values(), origin) for origin in spans}


def read_timeline(path: Path, origin: Origin) -> Timeline:
    """Return one of the timelines of a file; InvalidInput names the file if it is not there."""
    timelines = read_trace(path)
    if origin not in timelines:
        raise InvalidInput(f"{path}: has no {origin} timeline")
    return timelines[origin]


def _origin(event: dict[str, Any]) -> Origin:
    for origin in get_args(Origin):
        if event["args"]["origin"] == origin:
            return origin  # type: ignore[no-any-return] # get_args returns Any
    raise ValueError(f"origin {event['args']['origin']!r}")


def _add(spans: dict[str, Span], event: dict[str, Any]) -> None:
    args, start_s = event["args"], event["ts"] / _US
    on = (Resource(args["owner"], args["lane"]),)
    known = spans.get(event["name"])
    if known is not None:
        spans[event["name"]] = known._replace(on=known.on + on)
        return
    spans[event["name"]] = Span(
        event["name"], Kind(event["cat"]), on, start_s, start_s + event["dur"] / _US, args["part"]
    )
