"""The page: its frame, its head, and the files that it is made from."""

from collections.abc import Mapping
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from string import Template

from paceline.core.timeline import Origin, Timeline
from paceline.record.trace import read_trace
from paceline.report.format import duration, number, share
from paceline.report.markup import Html, element
from paceline.report.sections import conformity, facts, learning, parts, plans, steps
from paceline.result import Result, read_result

_ORIGINS: tuple[Origin, ...] = ("measured", "rehearsed", "predicted")


def write_report(folder: Path) -> Path:
    """Write report.html into the folder of a run and return its path.

    It is drawn from result.json and trace.json alone, and opens without a network. Raises
    InvalidInput that names the file if one of them is missing or damaged.
    """
    result = read_result(folder)
    page = render(result, read_trace(folder / "trace.json"))
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def render(result: Result, timelines: Mapping[Origin, Timeline]) -> str:
    """Return the whole page."""
    body = (
        _header(result),
        plans(result),
        learning(result.epochs),
        parts(result.comparison),
        steps([timelines[origin] for origin in _ORIGINS if origin in timelines]),
        facts(result),
        conformity(result.faults),
    )
    frame = Template(files("paceline.report").joinpath("page.html").read_text("utf-8"))
    title = element("title", f"{result.settings.model}, run {result.id} - Paceline")
    return frame.substitute(title=title, body="\n".join(body))


def _header(result: Result) -> Html:
    settings = result.settings
    workers = f"{settings.workers} worker{'s' if settings.workers > 1 else ''}"
    line = (
        f"on {settings.data}, strategy {settings.strategy}, {workers}, "
        f"{settings.batch_size} samples a step"
    )
    run = ", ".join(filter(None, (f"Run {result.id}", _date(result.id))))
    return element(
        "header",
        element("h1", settings.model),
        element("div", line),
        element("div", run, class_="soft"),
        element("div", *_tiles(result), class_="tiles"),
    )


def _tiles(result: Result) -> list[Html]:
    epochs = len(result.epochs)
    tiles = (
        ("test accuracy", share(result.accuracy, 2), f"after {epochs} epoch{'s' * (epochs != 1)}"),
        ("predicted step", duration(result.predicted_step_s), "before training"),
        ("measured step", duration(result.measured_step_s), "median of the untraced steps"),
        (
            "prediction error",
            share(result.prediction_error, signed=True),
            "predicted against measured",
        ),
        ("samples/s", number(result.samples_per_s), "measured"),
    )
    return [
        element(
            "div",
            element("span", label),
            element("b", value),
            element("small", note),
            class_="tile",
        )
        for label, value, note in tiles
    ]


def _date(run_id: str) -> str:
    """Return when the run was, for an id that begins as those which Paceline gives."""
    try:
        return datetime.strptime(run_id[:15], "%Y%m%d-%H%M%S").strftime("%Y-%m-%d %H:%M:%S")
    except ValueError:
        return ""
