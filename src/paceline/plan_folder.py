"""Keep a plan: the folder that `paceline plan --output` makes."""

import time
from collections.abc import Iterable
from pathlib import Path
from uuid import uuid4

from paceline.core.errors import InvalidInput
from paceline.core.timeline import Timeline
from paceline.plan_result import PlanResult
from paceline.record.trace import write_trace
from paceline.report import write_report


def new_plan_id(model: str) -> str:
    """Return a name for a plan's folder that says when it was made and of what."""
    what = model.replace(":", ".").replace("/", ".")
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{what}-planned-{uuid4().hex[:4]}"


def write_plan(output: Path, result: PlanResult, timelines: Iterable[Timeline]) -> Path:
    """Write result.json, trace.json and report.html into a new folder in `output`; return it.

    `timelines` is that of the best plan, if there is a plan. InvalidInput if it cannot be made.
    """
    folder = output / result.id
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise InvalidInput(f"output: cannot make {folder}: {error.strerror}") from None
    write_trace(folder / "trace.json", timelines)
    (folder / "result.json").write_text(result.model_dump_json(indent=2) + "\n")
    write_report(folder)
    return folder
