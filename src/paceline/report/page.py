"""The page: its frame, and which sections a folder's result gets."""

from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from string import Template

from paceline.core.errors import InvalidInput
from paceline.files.writing import write_text
from paceline.records.profile import ProfileResult
from paceline.records.result import PlanResult, RunResult, read_result
from paceline.records.scale import ScaleResult
from paceline.report import planned, profile, run, scale
from paceline.report.markup import Html, element


def write_report(folder: Path, rehearsal: Path | None = None) -> Path:
    """Write report.html into the folder of a result and return its path.

    It is drawn from result.json and trace.json alone, and opens without a network; with the folder
    of a `rehearsal` of the same run, from that one's too. Raises InvalidInput that names the file
    if one of them is missing or damaged, or if they do not belong together.
    """
    result = read_result(folder)
    if rehearsal is not None and not isinstance(result, RunResult):
        raise InvalidInput(
            str(folder),
            "no rehearsal can stand beside it",
            hint="a run of workers in step can have one",
        )
    match result:
        case RunResult():
            title, body = run.drawn(result, folder, rehearsal)
        case PlanResult():
            title, body = planned.drawn(result, folder)
        case ScaleResult():
            title, body = scale.drawn(result)
        case ProfileResult():
            title, body = profile.drawn(result, folder)
    path = folder / "report.html"
    write_page(path, title, body)
    return path


def write_page(path: Path, title: str, body: Iterable[Html]) -> None:
    """Write a page with these sections, which opens without a network."""
    sections, code = "\n".join(body), ""
    if "<figure>" in sections:
        # Plotly's code is a megabyte. As text it stands at the end, where the page's script runs it
        # once the rest is to be seen.
        plotly = _beside("plotly-basic.min.js")
        code = element("script", Html(plotly), type="text/plain", id="plotly")
    frame = Template(_beside("page.html"))
    named = element("title", f"{title} - Paceline")
    write_text(path, frame.substitute(title=named, body=sections, code=code))


def _beside(name: str) -> str:
    """Return a file of this package."""
    return files("paceline.report").joinpath(name).read_text("utf-8")
