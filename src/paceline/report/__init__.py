"""HTML reports, built only from the files in a run's folder."""

from pathlib import Path

from paceline.core.errors import InvalidInput
from paceline.records.profile import ProfileResult
from paceline.records.result import PlanResult, RunResult, read_result
from paceline.records.scale import ScaleResult
from paceline.report import plans, profile, run, scale
from paceline.report.page import write_page


def write_report(folder: Path, rehearsal: Path | None = None) -> Path:
    """Write report.html into the folder of a result and return its path.

    The report is built from result.json and trace.json, and loads nothing from a network.
    `rehearsal`: folder of a rehearsal with the same settings, for a comparison. Raises InvalidInput
    for a missing or damaged file, and for a rehearsal of another run.
    """
    result = read_result(folder)
    if rehearsal is not None and not isinstance(result, RunResult):
        raise InvalidInput(str(folder), "is not a run, and only runs have rehearsals")
    match result:
        case RunResult():
            page = run.page_of(result, folder, rehearsal)
        case PlanResult():
            page = plans.page_of(result, folder)
        case ScaleResult():
            page = scale.page_of(result)
        case ProfileResult():
            page = profile.page_of(result, folder)
    path = folder / "report.html"
    write_page(path, page)
    return path
