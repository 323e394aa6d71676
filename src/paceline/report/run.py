"""Show a run or rehearsal in a terminal or as an HTML page."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from operator import attrgetter
from pathlib import Path
from typing import Any

from rich.table import Table as TerminalTable

from paceline.core.compare import Comparison, breakdown
from paceline.core.errors import InvalidInput
from paceline.core.outcome import Epoch, Evaluation, UnevenWorker, Updates
from paceline.core.timeline import Origin, Timeline
from paceline.record.trace import read_timeline, read_trace
from paceline.records.result import RunResult, read_run
from paceline.report import advice, figures, tables
from paceline.report.figures import COLOURS, Described, Panel, escaped, figure_of, line
from paceline.report.format import (
    change_text,
    counted,
    duration,
    loss_text,
    nbytes,
    number,
    score_text,
)
from paceline.report.metrics import speedup
from paceline.report.page import Page, facts
from paceline.report.steps import through_time, two_steps
from paceline.report.tables import Marked, Rows, Table
from paceline.report.terminal import TRACED, shown

_TELLING = ("policy", "lanes", "head")  # strategy options, shown even if not set by the user
_ALIKE = ("model", "workers", "batch_size")  # settings that a run must share with its rehearsal
_MOST_FAULTS = 20
_HEIGHT = 290  # height of a figure in pixels
_SECONDS = {"title": "seconds of training", "rangemode": "tozero"}
_MOST_MISSED = 30  # the last bar of the staleness figure counts 30 or more missed updates


def page_of(result: RunResult, folder: Path, rehearsal: Path | None = None) -> Page:
    """Build the HTML page of a run; `rehearsal`: folder of a rehearsal to show next to the run."""
    timelines = read_trace(folder / "trace.json")
    if rehearsal is not None:
        timelines[Origin.REHEARSED] = _rehearsed_timeline(result, rehearsal)
    drawn = [timelines[origin] for origin in Origin if origin in timelines]
    comparison, epochs, tests = result.comparison, result.epochs, result.evaluations
    in_step = comparison is not None
    faults = list(result.faults or ())
    if (missing := len(faults) - _MOST_FAULTS) > 0:
        faults[_MOST_FAULTS:] = [f"and {missing} more, in result.json"]
    are_all = len(drawn) == len(Origin) and all(one.typical_steps for one in drawn)
    content = worker_sections(result) | {
        "result": result,
        "line": _line(result),
        "tiles": list(headlines(result)),
        "plans": _plans(result) if in_step and not result.is_rehearsal else None,
        "learning": learning(epochs, result.score) if epochs else None,
        "has_score": any(epoch.score is not None for epoch in epochs),
        "tests": _tests(tests, result.score) if tests else None,
        "trials": tables.trials_table(result) if result.trials else None,
        "parts": comparison
        and {
            "figure": figures.step_parts(_sides(comparison)),
            "numbers": tables.comparison_table(comparison),
        },
        "beside": _beside(timelines) if are_all else None,
        "through_time": list(through_time(drawn)) if in_step else [],
        "steps": two_steps(drawn),
        "settings": facts(result.settings, result.machine, result.peak_memory_bytes),
        "faults": faults,
    }
    what = "rehearsal" if result.is_rehearsal else "run"
    return Page(f"{result.settings.model}, {what} {result.id}", "run.html", content)


def _sides(comparison: Comparison) -> dict[str, dict[str, float]]:
    rows = comparison.rows
    left, right = ({r.quantity: s(r) for r in rows} for s in map(attrgetter, ("left_s", "right_s")))
    return {comparison.left: left, comparison.right: right}


def _rehearsed_timeline(result: RunResult, folder: Path) -> Timeline:
    """Read the timeline of the rehearsal in `folder`.

    Raises InvalidInput if the rehearsal's settings differ from the run's, or if `folder` has no
    rehearsal.
    """
    if result.comparison is None:
        problem = "has asynchronous workers, so it cannot be compared with a rehearsal"
        raise InvalidInput(result.id, problem)
    other = read_run(folder)
    if not other.is_rehearsal:
        raise InvalidInput(str(folder), "is a run, but --rehearsal requires a rehearsal")
    if result.is_rehearsal:
        raise InvalidInput(result.id, "is a rehearsal", hint="--rehearsal needs a run to compare")
    own = {name: getattr(result.settings, name) for name in _ALIKE} | {"strategy": result.strategy}
    for name, used in own.items():
        if (rehearsed := getattr(other.settings, name)) != used:
            problem = f"has {name} {rehearsed}, but run {result.id} has {used}"
            raise InvalidInput(str(folder), problem)
    return read_timeline(folder / "trace.json", Origin.REHEARSED)


def _line(result: RunResult) -> str:
    settings = result.settings
    rehearsed = f"rehearsed, not trained: {result.devices}"
    data = "its own data" if settings.kind != "train" or settings.data is None else settings.data
    what = f"on {data}" if settings.kind == "train" else rehearsed
    workers = f"workers {settings.workers}"
    if isinstance(settings.workers, int) or settings.workers.isdecimal():
        workers = counted(int(settings.workers), "worker")
    chosen = " (auto)" if result.strategy != settings.strategy else ""
    used = {name: result.config.get(name) for name in _TELLING} | settings.options
    options = "".join(f", {name} {value}" for name, value in used.items() if value is not None)
    return (
        f"{what}, strategy {result.strategy}{chosen}{options}, {workers}, "
        f"{settings.batch_size} samples a step"
    )


def headlines(result: RunResult) -> Iterator[tuple[str, str, str]]:
    """Yield the main results of a run, each as a name, a formatted value and a note."""
    yield "samples/s", number(result.samples_per_s), result.origin
    if result.tokens_per_s is not None:
        yield "tokens/s", number(result.tokens_per_s), result.origin
    if result.step_s is not None:
        note = "median of the untraced steps"
        if result.is_rehearsal and result.lower_quartile_s and result.upper_quartile_s:
            lower, upper = duration(result.lower_quartile_s), duration(result.upper_quartile_s)
            note = f"quartiles {lower} and {upper}"
        yield f"{result.origin} step", duration(result.step_s), note
    elif result.trained_s is not None:
        yield "training", duration(result.trained_s), "without the tests between epochs"
    if (times := speedup(result)) is not None:
        yield "speed-up", number(times), "over one worker with the whole batch"
    yield from _prediction(result)
    if result.epochs:
        last, note = result.epochs[-1], f"after {counted(len(result.epochs), 'epoch')}"
        name, loss = "test loss", last.test_loss
        if loss is None:
            name, loss = "train loss", last.train_loss
        if last.score is None:
            yield name, loss_text(loss), note
        else:
            note = f"{note}, {name} {loss_text(loss)}"
            yield f"test {result.score}", score_text(result.score, last.score), note


def _prediction(result: RunResult) -> Iterator[tuple[str, str, str]]:
    within = result.predicted_range_s
    if result.predicted_step_s is not None:
        note = "before the rehearsal" if result.is_rehearsal else "before training"
        if within is not None:
            held = f"{duration(within[0])} to {duration(within[1])}"
            note = f"expected range in 9 of 10 cases: {held}"
        yield "predicted step", duration(result.predicted_step_s), note
    if result.prediction_error is not None:
        note = f"predicted against {result.origin}"
        if within is not None and result.step_s is not None:
            lies = "within" if within[0] <= result.step_s <= within[1] else "outside"
            note = f"the {result.origin} step is {lies} the range"
        yield "prediction error", change_text(result.prediction_error), note


def _plans(result: RunResult) -> Table:
    """Return a table of all plans, in which the plan that the run used is marked."""
    table = tables.plans_table(result.plans).without("devices", "efficiency", "exposed", "memory")
    used = result.strategy, result.settings.workers
    rows: Rows = []
    for plan, (name, *cells) in zip(result.plans, table.rows, strict=True):
        is_used = (plan.strategy, plan.workers) == used
        rows.append((Marked(name, chip="this run") if is_used else name, *cells))
    return Table(table.head, rows, table.text)


def _tests(evaluations: Sequence[Evaluation], score: str) -> dict[str, Any]:
    rows: Rows = [
        (f"{one.num_steps:,}", loss_text(one.test_loss), score_text(score, one.score))
        for one in evaluations
    ]
    numbers = Table(("step", "test loss", f"test {score}"), rows)
    losses = {"test loss": [one.test_loss for one in evaluations]}
    steps, scores = [one.num_steps for one in evaluations], [one.score for one in evaluations]
    axis = figures.whole_numbers(steps[-1]) | {"rangemode": "tozero"}
    figure = figures.learning_curves("step", steps, axis, losses, score, scores)
    return {"figure": figure, "numbers": numbers}


def learning(epochs: Sequence[Epoch], score: str) -> dict[str, Any]:
    """Return a figure ("figure") and a table ("numbers") of losses and scores by epoch."""
    rows: Rows = []
    for epoch in epochs:
        lost = f"{epoch.train_loss:.4f}", loss_text(epoch.test_loss)
        reached = score_text(score, epoch.score), duration(epoch.seconds)
        rows.append((str(epoch.number + 1), *lost, *reached))
    numbers = Table(("epoch", "train loss", "test loss", f"test {score}", "time"), rows)
    places, scores = [one.number + 1 for one in epochs], [one.score for one in epochs]
    axis = figures.whole_numbers(places[-1]) | {"range": [0.5, len(epochs) + 0.5]}
    figure = figures.learning_curves(
        "epoch", places, axis, figures.losses_of(epochs), score, scores
    )
    return {"figure": figure, "numbers": numbers}


def _beside(timelines: Mapping[Origin, Timeline]) -> Table:
    columns = {
        origin: {"step": timelines[origin].typical_step_s()} | breakdown(timelines[origin]).seconds
        for origin in reversed(Origin)
    }
    measured = columns.pop(Origin.MEASURED)
    rows: Rows = []
    for quantity, measured_s in measured.items():
        row = [quantity]
        for seconds in columns.values():
            own_s = seconds.get(quantity, 0.0)
            error = own_s / measured_s - 1 if measured_s else None
            row += [duration(own_s), change_text(error)]
        rows.append((*row, duration(measured_s)))
    head = ("per step", Origin.PREDICTED, "error", Origin.REHEARSED, "error", Origin.MEASURED)
    return Table(head, rows)


def worker_sections(result: RunResult) -> dict[str, Any]:
    """Return the variables of workers.html: tables and figures, or None where a run has no data."""
    made, workers, losses = result.updates, result.workers, figures.losses_of(result.epochs)
    ends_s = list(accumulate(epoch.seconds for epoch in result.epochs))
    in_time = figures.learning_curves(_SECONDS["title"], ends_s, _SECONDS, losses)
    has_sizes = any(worker.batch_sizes for worker in workers)
    num_updates = 0 if made is None else made.count
    return {
        "traffic": tables.traffic_table(result.traffic, num_updates) if result.traffic else None,
        "loss_in_time": in_time if made and ends_s else None,
        "updates": tables.workers_table(result) if made else None,
        "gaps": _gaps(made) if made and made.gaps else None,
        "batch_sizes": _batch_sizes(workers) if made and has_sizes else None,
        "staleness": _staleness(made) if made else None,
        "most_missed": _MOST_MISSED,
        "utilisation": _utilisation(result) if result.utilisation else None,
    }


def _gaps(made: Updates) -> Described:
    """Draw, over time, how many updates the fastest worker is ahead of the slowest."""
    # Sort by time, because updates of different workers may be recorded out of order.
    times, gaps = zip(*sorted(made.gaps), strict=True)
    y: Described = {"title": "updates ahead of the slowest", "rangemode": "tozero"}
    panel = Panel([line(0, "ahead", times, gaps)], _SECONDS, y | figures.whole_numbers(max(gaps)))
    return figure_of([panel], _HEIGHT)


def _batch_sizes(workers: Sequence[UnevenWorker]) -> Described:
    lines = []
    for i, worker in enumerate(workers):
        times, sizes = [time for time, _ in worker.batch_sizes], [n for _, n in worker.batch_sizes]
        lines.append(line(i, worker.name, times, sizes))
        lines[-1]["line"]["shape"] = "hv"
    every = [size for worker in workers for _, size in worker.batch_sizes]
    y = {"title": "samples"} | figures.decades(every)
    return figure_of([Panel(lines, _SECONDS, y)], _HEIGHT)


def _staleness(made: Updates) -> Described:
    drawn: list[Described] = []
    for i, (name, batches) in enumerate(made.staleness.items()):
        bars = Counter[int]()
        for missed, times in batches.items():
            bars[min(missed, _MOST_MISSED)] += times
        total = sum(bars.values()) or 1
        bar: Described = {"type": "bar", "name": escaped(name), "x": list(bars)}
        bar |= {"y": [times / total for times in bars.values()]}
        drawn.append(bar | {"marker": {"color": COLOURS[i % len(COLOURS)]}})
    most = max((missed for batches in made.staleness.values() for missed in batches), default=0)
    axis = figures.whole_numbers(min(most, _MOST_MISSED))
    x = {"title": "updates of others that a batch missed"} | axis
    y = {"title": "share of batches", "tickformat": ".0~%"}
    return figure_of([Panel(drawn, x, y)], _HEIGHT)


def _utilisation(result: RunResult) -> Described:
    happened, predicted = result.utilisation, result.predicted_utilisation
    groups = {"happened": happened}
    if predicted:
        groups["predicted"] = {name: predicted.get(name, 0.0) for name in happened}
    return figures.share_bars(groups)


def result_tables(result: RunResult, folder: str) -> Iterator[TerminalTable | str]:
    """Yield the terminal tables of a run or rehearsal, then a summary of the results as text."""
    if result.trials:
        yield shown("Chunk sizes tried, seconds per step", tables.trials_table(result))
    if result.workers:
        yield shown("Workers", tables.workers_table(result), gap=2)
    if result.traffic:
        yield shown("Bytes by purpose", tables.traffic_table(result.traffic), gap=2)
    if result.comparison is not None:
        yield shown(TRACED, tables.comparison_table(result.comparison))
    yield "\n".join(f"{name:<16} {text}" for name, text in _lines(result, folder))


def _lines(result: RunResult, folder: str) -> Iterator[tuple[str, str]]:
    workers, files = counted(result.num_workers, "worker"), "result.json, trace.json, report.html"
    if result.is_rehearsal:
        yield "rehearsed", f"no training: {workers} {result.devices}"
    else:
        yield "trained", f"with {workers}"
        files += ", model.safetensors" if result.epochs else ""
    yield from ((name, f"{value}, {note}") for name, value, note in headlines(result))
    yield from _exchanged(result)
    if result.head is not None:
        whole, own = nbytes(result.head.state_nbytes), nbytes(max(result.head.own_state_nbytes))
        yield "head", f"{own} of {whole} per worker: parameters, gradients, optimizer"
    if result.is_rehearsal and result.faults is not None:
        faults = counted(len(result.faults), "place")
        departs = f"departs from the plan in {faults}" if result.faults else "follows the plan"
        yield "trace", departs
    yield from (("advice", message) for message in advice.shown(result.findings))
    yield "written", f"{folder}/{files}"


def _exchanged(result: RunResult) -> Iterator[tuple[str, str]]:
    if result.updates is not None:
        stale, count = result.updates.mean_staleness, result.updates.count
        yield "staleness", f"{stale:.2f} on average, of {count:,} updates"
    if result.sent_share is not None and result.sent_share.warning:
        yield "codec", result.sent_share.warning
    if result.shares is not None:
        yield "shares", f"{' + '.join(map(str, result.shares))} samples"
