"""A run beside a rehearsal of it: predicted, rehearsed and measured in one table."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

from paceline.core.breakdown import Breakdown, breakdown
from paceline.core.errors import InvalidInput
from paceline.core.timeline import Origin, Timeline
from paceline.record.trace import read_timeline
from paceline.report.format import duration, share
from paceline.report.markup import Html, element, table
from paceline.result import RehearsalResult, Result, read_result

_ORIGINS: tuple[Origin, ...] = ("predicted", "rehearsed", "measured")
_ALIKE = ("model", "workers", "batch_size")


def rehearsed_timeline(result: Result | RehearsalResult, folder: Path) -> Timeline:
    """Return what a rehearsal in `folder` did. InvalidInput if it is not one of this run."""
    other = read_result(folder)
    if not isinstance(other, RehearsalResult):
        raise InvalidInput(f"{folder}: is a run and no rehearsal")
    if not isinstance(result, Result):
        raise InvalidInput(f"{result.id}: is itself a rehearsal; name a run, and this beside it")
    for field in _ALIKE:
        one, rehearsed = getattr(result.settings, field), getattr(other.settings, field)
        if one != rehearsed:
            raise InvalidInput(
                f"{folder}: rehearses {field} {rehearsed}, and run {result.id} has {one}"
            )
    if result.strategy != other.settings.strategy:
        raise InvalidInput(
            f"{folder}: rehearses strategy {other.settings.strategy}, and run {result.id} used "
            f"{result.strategy}"
        )
    return read_timeline(folder / "trace.json", "rehearsed")


def beside(timelines: Mapping[Origin, Timeline]) -> Html:
    """Return where a step goes in each timeline, and how far each is from the measured one."""
    origins = [origin for origin in _ORIGINS if origin in timelines]
    columns = {origin: _seconds(timelines[origin]) for origin in origins}
    rows = []
    for quantity, measured in columns["measured"].items():
        row = [quantity]
        for origin in origins:
            seconds = columns[origin][quantity]
            row.append(duration(seconds))
            if origin != "measured":
                error = seconds / measured - 1 if measured else None
                row.append("-" if error is None else share(error, signed=True))
        rows.append(tuple(row))
    head = ["per step"]
    for origin in origins:
        head += [origin] if origin == "measured" else [origin, "error"]
    note = "A rehearsal paces the layers as a device would compute them; its exchange is real."
    return element(
        "section",
        element("h2", "Predicted, rehearsed and measured"),
        element("p", note, class_="soft"),
        table(tuple(head), rows),
    )


def _seconds(timeline: Timeline) -> dict[str, float]:
    parts = breakdown(timeline)
    own = {field.name.removesuffix("_s"): getattr(parts, field.name) for field in fields(Breakdown)}
    return {"step": timeline.typical_step_s()} | own
