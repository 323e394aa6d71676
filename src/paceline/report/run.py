"""The sections of a run of a synchronous strategy, or of a rehearsal of one."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from paceline.core.timeline import Origin, Timeline
from paceline.record.trace import read_trace
from paceline.report.answers import of_run
from paceline.report.beside import beside, rehearsed_timeline
from paceline.report.format import duration, number, share
from paceline.report.header import Drawn, Tile, header
from paceline.report.insights import insights
from paceline.report.markup import Html
from paceline.report.sections import (
    conformity,
    facts,
    learning,
    parts,
    plans,
    steps,
    traffic,
    trials,
)
from paceline.report.through import through_time
from paceline.result import RehearsalResult, Result, read_result

_ORIGINS: tuple[Origin, ...] = ("measured", "rehearsed", "predicted")


def drawn(folder: Path, rehearsal: Path | None = None) -> Drawn:
    """Return the page of the folder of a run or, with that of a rehearsal of it, of both."""
    result = read_result(folder)
    timelines = read_trace(folder / "trace.json")
    if rehearsal is not None:
        timelines["rehearsed"] = rehearsed_timeline(result, rehearsal)
    what = "rehearsal" if isinstance(result, RehearsalResult) else "run"
    return f"{result.settings.model}, {what} {result.id}", _sections(result, timelines)


def _sections(
    result: Result | RehearsalResult, timelines: Mapping[Origin, Timeline]
) -> Iterator[Html]:
    shown = [timelines[origin] for origin in _ORIGINS if origin in timelines]
    yield _header(result)
    yield insights(of_run(result, timelines))
    yield from _rehearsal(result) if isinstance(result, RehearsalResult) else _run(result)
    if len(shown) == len(_ORIGINS):
        yield beside(timelines)
    yield from through_time(shown)
    yield steps(shown)
    yield facts(result)
    yield conformity(result.faults)


def _run(result: Result) -> Iterator[Html]:
    yield plans(result)
    yield learning(result.epochs, result.score)
    yield parts(result.comparison)
    if result.split is not None:
        yield traffic(result.split)


def _rehearsal(result: RehearsalResult) -> Iterator[Html]:
    if result.trials:
        yield trials(result)
    yield parts(result.comparison)


def _header(result: Result | RehearsalResult) -> Html:
    settings = result.settings
    workers = f"{settings.workers} worker{'s' if settings.workers > 1 else ''}"
    if isinstance(result, Result):
        what, used, tiles = f"on {result.settings.data}", result.strategy, _tiles(result)
    else:
        what, used = f"rehearsed, not trained: {result.devices}", settings.strategy
        tiles = _rehearsed_tiles(result)
    chosen = " (auto)" if used != settings.strategy else ""
    line = f"{what}, strategy {used}{chosen}, {workers}, {settings.batch_size} samples a step"
    return header(settings.model, line, result.id, tiles)


def _tiles(result: Result) -> Iterable[Tile]:
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


def _rehearsed_tiles(result: RehearsalResult) -> Iterable[Tile]:
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
