"""Write HTML reports, using only the files in a result's folder."""

from pathlib import Path

from paceline.core.errors import InvalidInput
from paceline.records.profile import ProfileResult
from paceline.records.result import PlanResult, RunResult, read_result
from paceline.records.scale import ScaleResult
from paceline.report import plans, profile, run, scale
from paceline.report.page import write_page


def write_report(folder: Path, rehearsal: Path | None = None) -> Path:
    """Write report.html into the folder of a result, and return the path of report.html.

    The report is built from result.json and trace.json in `folder`, and loads nothing from a
    network. `rehearsal`: folder of a rehearsal to compare with the run in `folder`. Raises
    InvalidInput if a file is missing or damaged, or if the rehearsal and the run do not match.
    """
    result = read_result(folder)
    if rehearsal is not None and not isinstance(result, RunResult):
        raise InvalidInput(str(folder), "is not a run; only a run can be compared with a rehearsal")
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
