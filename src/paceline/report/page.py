"""The page: its frame, its head, and the files that it is made from."""

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from string import Template

from paceline.core.errors import InvalidInput
from paceline.core.timeline import Origin, Timeline
from paceline.record.trace import read_trace
from paceline.report.beside import beside, rehearsed_timeline
from paceline.report.format import duration, number, share
from paceline.report.markup import Html, element
from paceline.report.sections import conformity, facts, learning, parts, plans, steps, trials
from paceline.report.uneven import sections_of
from paceline.report.wheel import sections_of as wheel_sections
from paceline.result import RehearsalResult, Result, read_result
from paceline.uneven_result import UnevenResult, read_uneven
from paceline.wheel_result import WheelRehearsal, read_wheel

_ORIGINS: tuple[Origin, ...] = ("measured", "rehearsed", "predicted")
_Tile = tuple[str, str, str]  # what, how much, and a note


def write_report(folder: Path, rehearsal: Path | None = None) -> Path:
    """Write report.html into the folder of a run and return its path.

    It is drawn from result.json and trace.json alone, and opens without a network; with the folder
    of a `rehearsal` of the same run, from that one's too. Raises InvalidInput that names the file
    if one of them is missing or damaged, or if they do not belong together.
    """
    asynchronous = read_uneven(folder) or read_wheel(folder)
    if asynchronous is not None:
        if rehearsal is not None:
            raise InvalidInput(f"{folder}: a run of asynchronous workers has no rehearsal")
        timelines = read_trace(folder / "trace.json")
        body = (
            sections_of(asynchronous, timelines)
            if isinstance(asynchronous, UnevenResult)
            else wheel_sections(asynchronous, timelines)
        )
        what = "rehearsal" if isinstance(asynchronous, WheelRehearsal) else "run"
        page = framed(f"{asynchronous.settings.model}, {what} {asynchronous.id}", body)
    else:
        result = read_result(folder)
        timelines = read_trace(folder / "trace.json")
        if rehearsal is not None:
            timelines["rehearsed"] = rehearsed_timeline(result, rehearsal)
        page = render(result, timelines)
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def render(result: Result | RehearsalResult, timelines: Mapping[Origin, Timeline]) -> str:
    """Return the whole page."""
    shown = [timelines[origin] for origin in _ORIGINS if origin in timelines]
    if isinstance(result, RehearsalResult):
        what, first = "rehearsal", _rehearsal(result)
    else:
        what, first = "run", _run(result)
    together = [beside(timelines)] if len(shown) == len(_ORIGINS) else []
    body = (*first, *together, steps(shown), facts(result), conformity(result.faults))
    return framed(f"{result.settings.model}, {what} {result.id}", body)


def framed(title: str, body: Iterable[Html]) -> str:
    """Return the page with this title and these sections."""
    frame = Template(files("paceline.report").joinpath("page.html").read_text("utf-8"))
    head = element("title", f"{title} - Paceline")
    return frame.substitute(title=head, body="\n".join(body))


def _run(result: Result) -> Iterator[Html]:
    yield _header(result, f"on {result.settings.data}", _tiles(result))
    yield plans(result)
    yield learning(result.epochs, result.score)
    yield parts(result.comparison)


def _rehearsal(result: RehearsalResult) -> Iterator[Html]:
    yield _header(result, f"rehearsed, not trained: {result.devices}", _rehearsed_tiles(result))
    if result.trials:
        yield trials(result)
    yield parts(result.comparison, first=True)


def _header(result: Result | RehearsalResult, what: str, tiles: Iterable[_Tile]) -> Html:
    settings = result.settings
    workers = f"{settings.workers} worker{'s' if settings.workers > 1 else ''}"
    used = result.strategy if isinstance(result, Result) else settings.strategy
    chosen = " (auto)" if used != settings.strategy else ""
    line = f"{what}, strategy {used}{chosen}, {workers}, {settings.batch_size} samples a step"
    run = ", ".join(filter(None, (f"Run {result.id}", _date(result.id))))
    return element(
        "header",
        element("h1", settings.model),
        element("div", line),
        element("div", run, class_="soft"),
        element("div", *map(_tile, tiles), class_="tiles"),
    )


def _tiles(result: Result) -> tuple[_Tile, ...]:
    epochs = len(result.epochs)
    return (
        (
            f"test {result.score}",
            share(result.accuracy, 2),
            f"after {epochs} epoch{'s' * (epochs != 1)}",
        ),
        ("predicted step", duration(result.predicted_step_s), "before training"),
        ("measured step", duration(result.measured_step_s), "median of the untraced steps"),
        (
            "prediction error",
            share(result.prediction_error, signed=True),
            "predicted against measured",
        ),
        ("samples/s", number(result.samples_per_s), "measured"),
    )


def _rehearsed_tiles(result: RehearsalResult) -> tuple[_Tile, ...]:
    lower, upper = duration(result.lower_quartile_s), duration(result.upper_quartile_s)
    return (
        ("predicted step", duration(result.predicted_step_s), "before the rehearsal"),
        ("rehearsed step", duration(result.rehearsed_step_s), f"quartiles {lower} and {upper}"),
        (
            "prediction error",
            share(result.prediction_error, signed=True),
            "predicted against rehearsed",
        ),
        ("samples/s", number(result.samples_per_s), "rehearsed"),
    )


def _tile(tile: _Tile) -> Html:
    label, value, note = tile
    return element(
        "div", element("span", label), element("b", value), element("small", note), class_="tile"
    )


def _date(run_id: str) -> str:
    """Return when the run was, for an id that begins as those which Paceline gives."""
    try:
        return datetime.strptime(run_id[:15], "%Y%m%d-%H%M%S").strftime("%Y-%m-%d %H:%M:%S")
    except ValueError:
        return ""
