"""The page: its frame, and which sections a folder's result gets."""

from collections.abc import Callable, Iterable
from importlib.resources import files
from pathlib import Path
from string import Template

from plotly.offline import get_plotlyjs

from paceline.core.errors import InvalidInput
from paceline.report import planned, profile, run, scale, uneven, wheel
from paceline.report.header import Drawn
from paceline.report.markup import Html, element

# Each returns None for a result of another kind.
_KINDS: tuple[Callable[[Path], Drawn | None], ...] = (
    uneven.drawn,
    wheel.drawn,
    planned.drawn,
    scale.drawn,
    profile.drawn,
)


def write_report(folder: Path, rehearsal: Path | None = None) -> Path:
    """Write report.html into the folder of a result and return its path.

    It is drawn from result.json and trace.json alone, and opens without a network; with the folder
    of a `rehearsal` of the same run, from that one's too. Raises InvalidInput that names the file
    if one of them is missing or damaged, or if they do not belong together.
    """
    title, body = _drawn(folder, rehearsal)
    page = framed(title, body)
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def _drawn(folder: Path, rehearsal: Path | None) -> Drawn:
    for kind in _KINDS:
        drawn = kind(folder)
        if drawn is None:
            continue
        if rehearsal is not None:
            raise InvalidInput(
                f"{folder}: no rehearsal can stand beside it; a run of workers in step can have one"
            )
        return drawn
    return run.drawn(folder, rehearsal)


def framed(title: str, body: Iterable[Html]) -> str:
    """Return the page with this title and these sections; if one has figures, with plotly's code.

    That code is four megabytes. As text it stands at the end, where the page's script runs it once
    the rest is to be seen.
    """
    frame = Template(files("paceline.report").joinpath("page.html").read_text("utf-8"))
    sections = "\n".join(body)
    code = ""
    if "<figure>" in sections:
        code = element("script", Html(get_plotlyjs()), type="text/plain", id="plotly")
    return frame.substitute(title=element("title", f"{title} - Paceline"), body=sections, code=code)
