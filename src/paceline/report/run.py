"""The page of a training or a rehearsal: a section for everything that its result has."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from paceline.core.compare import Comparison, breakdown
from paceline.core.errors import InvalidInput
from paceline.core.outcome import Epoch, Evaluation
from paceline.core.timeline import Origin, Timeline
from paceline.record.trace import read_timeline, read_trace
from paceline.records.result import RunResult, read_run
from paceline.report import markup
from paceline.report.figures import (
    PARTS,
    evaluation_curves,
    figure_element,
    learning_curves,
    step_parts,
)
from paceline.report.format import (
    change_text,
    counted,
    duration,
    loss_text,
    nbytes,
    number,
    optional_score,
    score_text,
)
from paceline.report.insights import of_asynchronous, of_run
from paceline.report.markup import Drawn, Html, element, folded, header, listed, section, table
from paceline.report.steps import swatched, through_time, two_steps
from paceline.report.workers import worker_sections

_TELLING = ("policy", "lanes", "head")  # of a configuration, also where nobody has named them
_ALIKE = ("model", "workers", "batch_size")  # settings of a run and of a rehearsal beside it
_MOST_FAULTS = 20


def drawn(result: RunResult, folder: Path, rehearsal: Path | None = None) -> Drawn:
    """Return the page of a run or, with the folder of a rehearsal of it, of both."""
    timelines = read_trace(folder / "trace.json")
    if rehearsal is not None:
        timelines[Origin.REHEARSED] = _rehearsed_timeline(result, rehearsal)
    what = "rehearsal" if result.is_rehearsal else "run"
    return f"{result.settings.model}, {what} {result.id}", _sections(result, timelines)


def _rehearsed_timeline(result: RunResult, folder: Path) -> Timeline:
    """Return the timeline of a rehearsal in `folder`; InvalidInput if it is not of this run."""
    if result.comparison is None:
        raise InvalidInput(
            result.id,
            "no rehearsal can stand beside it",
            hint="a run of workers in step can have one",
        )
    other = read_run(folder)
    if not other.is_rehearsal:
        raise InvalidInput(str(folder), "is a run and no rehearsal")
    if result.is_rehearsal:
        raise InvalidInput(
            result.id, "is itself a rehearsal", hint="name a run, and this beside it"
        )
    for field in _ALIKE:
        one, rehearsed = getattr(result.settings, field), getattr(other.settings, field)
        if one != rehearsed:
            raise InvalidInput(
                str(folder), f"rehearses {field} {rehearsed}, and run {result.id} has {one}"
            )
    if result.strategy != other.settings.strategy:
        rehearsed = other.settings.strategy
        used = f"run {result.id} used {result.strategy}"
        raise InvalidInput(str(folder), f"rehearses strategy {rehearsed}, and {used}")
    return read_timeline(folder / "trace.json", Origin.REHEARSED)


def _sections(result: RunResult, timelines: Mapping[Origin, Timeline]) -> Iterator[Html]:
    shown = [timelines[origin] for origin in Origin if origin in timelines]
    yield _header(result)
    in_step = result.comparison is not None
    yield markup.insights(of_run(result, timelines) if in_step else of_asynchronous(result))
    if in_step and not result.is_rehearsal:
        yield _plans(result)
    if result.epochs:
        yield _learning(result.epochs, result.score)
    if result.evaluations:
        yield _tests(result.evaluations, result.score)
    if result.trials:
        yield _trials(result)
    if result.comparison is not None:
        yield _parts(result.comparison)
    yield from worker_sections(result)
    if len(shown) == len(Origin) and all(one.typical_steps for one in shown):
        yield _beside(timelines)
    if in_step:
        yield from through_time(shown)
    yield two_steps(shown)
    yield markup.facts(result.settings, result.machine, result.peak_memory_bytes)
    if result.lost:
        yield section("Lost workers", "", listed(result.lost))
    if result.faults:
        note = f"The trace departs from the plan in {counted(len(result.faults), 'place')}:"
        faults, missing = list(result.faults[:_MOST_FAULTS]), len(result.faults) - _MOST_FAULTS
        faults += [f"and {missing} more, in result.json"] if missing > 0 else []
        yield section("Conformity", note, listed(faults, class_="faults"))
    else:
        yield section("Conformity", "The trace conforms to the plan.")


def _header(result: RunResult) -> Html:
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
    line = (
        f"{what}, strategy {result.strategy}{chosen}{options}, {workers}, "
        f"{settings.batch_size} samples a step"
    )
    return header(settings.model, line, result.id, list(_tiles(result)))


def _tiles(result: RunResult) -> Iterator[tuple[str, str, str]]:
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
    yield from _prediction(result)
    if result.epochs and (reached := result.epochs[-1].score) is not None:
        note = f"after {counted(len(result.epochs), 'epoch')}"
        yield f"test {result.score}", score_text(result.score, reached), note
    if result.updates is not None and result.epochs:
        yield "test loss", loss_text(result.epochs[-1].test_loss), "at the end"


def _prediction(result: RunResult) -> Iterator[tuple[str, str, str]]:
    within = result.predicted_range_s
    if result.predicted_step_s is not None:
        note = "before the rehearsal" if result.is_rehearsal else "before training"
        if within is not None:
            held = f"{duration(within[0])} to {duration(within[1])}"
            note = f"range meant to hold 9 of 10 medians: {held}"
        yield "predicted step", duration(result.predicted_step_s), note
    if result.prediction_error is not None:
        note = f"predicted against {result.origin}"
        if within is not None and result.step_s is not None:
            lies = "within" if within[0] <= result.step_s <= within[1] else "outside"
            note = f"the {result.origin} step is {lies} the range"
        yield "prediction error", change_text(result.prediction_error), note


def _plans(result: RunResult) -> Html:
    rows = []
    for plan in result.plans:
        name = f"{plan.strategy}, {plan.codec}" if plan.codec else plan.strategy
        if (plan.strategy, plan.workers) == (result.strategy, result.settings.workers):
            chip = element("span", "this run", class_="chip")
            name = element("span", element("b", name), chip)
        wire = nbytes(plan.wire_nbytes_per_step)
        rate = number(plan.samples_per_s)
        rows.append((name, str(plan.workers), duration(plan.step_s), rate, wire, plan.explanation))
    head = ("strategy", "workers", "predicted step", "predicted samples/s", "wire per step", "why")
    note = (
        "Predicted before the training, best first. Wire: bytes that a step sends over the "
        "busiest link, in one direction."
    )
    decisions = [element("p", decision) for decision in result.decisions]
    return section("Plan", note, table(head, rows, (0, 5), class_="wide plan"), *decisions)


def _tests(evaluations: Sequence[Evaluation], score: str) -> Html:
    rows = [
        (f"{one.num_steps:,}", loss_text(one.test_loss), optional_score(score, one.score))
        for one in evaluations
    ]
    figure = figure_element(evaluation_curves(evaluations, score), "evaluations")
    numbers = folded("The same in numbers", table(("step", "test loss", f"test {score}"), rows))
    return section("Tests by steps", "", figure, numbers)


def _learning(epochs: Sequence[Epoch], score: str) -> Html:
    rows = []
    for epoch in epochs:
        losses = f"{epoch.train_loss:.4f}", loss_text(epoch.test_loss)
        reached = optional_score(score, epoch.score), duration(epoch.seconds)
        rows.append((str(epoch.number + 1), *losses, *reached))
    head = ("epoch", "train loss", "test loss", f"test {score}", "time")
    figure = figure_element(learning_curves(epochs, score), "learning")
    has_score = any(epoch.score is not None for epoch in epochs)
    return section(
        f"Loss and {score}" if has_score else "Loss",
        "",
        figure,
        folded("The same in numbers", table(head, rows)),
    )


def _trials(result: RunResult) -> Html:
    chosen, rows = element("span", "chosen", class_="chip"), []
    for trial in result.trials:
        mark = chosen if trial.chunk == result.config.get("chunk") else ""
        seconds = duration(trial.predicted_s), duration(trial.rehearsed_s)
        rows.append((str(trial.chunk), *seconds, mark))
    note = "Layers that are exchanged together, in the order in which the search tried them."
    head = ("layers", "predicted step", "rehearsed step", "")
    return section("Chunk search", note, table(head, rows))


def _parts(comparison: Comparison) -> Html:
    note = (
        f"A step as {comparison.left} and as {comparison.right}, on average over the devices "
        "and over the typical steps: the middle half by duration. "
        f"What is {comparison.right} here are the traced steps, which recording makes a little "
        "slower. Hidden communication runs beside the computation and adds nothing to the step; "
        "exposed communication does."
    )
    rows = []
    for row in comparison.rows:
        fill = PARTS.get(row.quantity)
        name = swatched(fill) if fill else element("b", row.quantity)
        error = change_text(row.error)
        rows.append((name, duration(row.left_s), duration(row.right_s), error))
    head = ("per step", comparison.left, comparison.right, f"error of {comparison.left}")
    figure = figure_element(step_parts(comparison), "parts")
    return section("Where a step goes", note, figure, table(head, rows))


def _beside(timelines: Mapping[Origin, Timeline]) -> Html:
    columns = {
        origin: {"step": timelines[origin].typical_step_s()} | breakdown(timelines[origin]).seconds
        for origin in reversed(Origin)
    }
    measured, rows = columns.pop(Origin.MEASURED), []
    for quantity, measured_s in measured.items():
        row = [quantity]
        for seconds in columns.values():
            own_s = seconds.get(quantity, 0.0)
            error = own_s / measured_s - 1 if measured_s else None
            row += [duration(own_s), change_text(error)]
        rows.append([*row, duration(measured_s)])
    head = ("per step", Origin.PREDICTED, "error", Origin.REHEARSED, "error", Origin.MEASURED)
    note = "A rehearsal paces the layers as a device would compute them; its exchange is real."
    return section("Predicted, rehearsed and measured", note, table(head, rows))
