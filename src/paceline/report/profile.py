"""The sections of a profile: where a step goes, what waits, what is kept, what fits."""

from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path

import plotly.graph_objects as go

from paceline.core.plan import Kind
from paceline.core.timeline import Origin, Timeline
from paceline.profile_result import LargestBatch, ProfileResult, read_profile
from paceline.record.trace import read_trace
from paceline.report.figures import styled
from paceline.report.format import duration, nbytes, number, share
from paceline.report.header import Drawn, header
from paceline.report.insights import insights
from paceline.report.markup import Html, element, table
from paceline.report.palette import KINDS, PARTS
from paceline.report.sections import facts, figure_of, section, steps

_MOST_BARS = 30  # layers of the figure, the slowest ones; the table has all
_HEIGHT, _LEFT, _ROW = 130, 60, 22  # pixels


def drawn(folder: Path) -> Drawn | None:
    """Return the page of the folder of a profile; None of another kind."""
    result = read_profile(folder)
    if result is None:
        return None
    title = f"{result.settings.model}, profile {result.id}"
    return title, _sections(result, read_trace(folder / "trace.json"))


def _sections(result: ProfileResult, timelines: Mapping[Origin, Timeline]) -> Iterator[Html]:
    yield _header(result)
    yield insights(result.insights)
    yield stages(result)
    yield layers(result)
    yield overheads(result)
    yield resources(result)
    yield operators(result)
    yield agreement(result)
    yield memory(result)
    if result.largest is not None:
        yield largest(result.largest)
    yield steps(list(timelines.values()))
    yield facts(result)


def _header(result: ProfileResult) -> Html:
    settings, step = result.settings, result.step
    workers = f"{settings.workers} worker{'s' if settings.workers > 1 else ''}"
    line = (
        f"profiled on {settings.data}, strategy {settings.strategy}, {workers}, "
        f"{settings.batch_size} samples a step"
    )
    exposed = next((row.seconds for row in result.stages if row.stage == "exposed"), 0.0)
    quartiles = f"quartiles {duration(step.lower_s)} and {duration(step.upper_s)}"
    memory = result.memory
    tiles = (
        ("step", duration(step.median_s), quartiles),
        ("samples/s", number(result.samples_per_s), "measured, not recorded"),
        ("exposed", share(exposed / result.stages_s), "communication, of a step"),
        ("memory", nbytes(memory.measured), f"of tensors; {nbytes(memory.predicted)} predicted"),
        ("recording", share(result.cost, signed=True), "what it added to a step"),
    )
    return header(settings.model, line, result.id, tiles)


def stages(result: ProfileResult) -> Html:
    """Return where a step goes, as a bar and as a table."""
    figure, end = go.Figure(), 0.0
    for row in result.stages:
        if row.stage == "hidden" or not row.seconds:
            continue
        fill = PARTS[row.stage]
        figure.add_trace(
            go.Bar(
                name=fill.label,
                orientation="h",
                y=[""],
                x=[1e3 * row.seconds],
                base=[1e3 * end],
                marker=fill.marker({"width": 0}),
                hovertemplate=f"{fill.label} {duration(row.seconds)}<extra></extra>",
            )
        )
        end += row.seconds
    figure.update_layout(barmode="overlay")
    figure.update_xaxes(title_text="milliseconds of a step")
    rows = [
        (
            PARTS[row.stage].label if row.stage in PARTS else row.stage,
            duration(row.seconds),
            "beside it" if row.stage == "hidden" else share(row.seconds / result.stages_s),
        )
        for row in result.stages
    ]
    rows.append(("sum", duration(result.stages_s), share(1.0)))
    note = (
        "Means over the workers and over the recorded steps, the middle half of them. Hidden "
        "communication runs beside computation and adds nothing. The sum is "
        f"{share(result.stages_error, signed=True)} off the recorded steps by the clock, "
        f"{duration(result.recorded_typical_s)}."
    )
    bar = figure_of(styled(figure, _HEIGHT, 12), "stages")
    return section("Where a step goes", note, bar, table(("part", "time", "of the step"), rows))


def layers(result: ProfileResult) -> Html:
    """Return the time of each layer, the slowest as bars, all in a table."""
    slowest = sorted(result.layers, key=lambda row: row.median_s, reverse=True)[:_MOST_BARS]
    names = [escape(row.name, quote=False) for row in slowest]
    figure = go.Figure()
    for kind, values in (
        (Kind.FORWARD, [row.forward.median_s for row in slowest]),
        (Kind.BACKWARD, [row.backward.median_s for row in slowest]),
    ):
        fill = KINDS[kind]
        figure.add_trace(
            go.Bar(
                name=fill.label,
                orientation="h",
                y=names,
                x=[1e3 * value for value in values],
                marker=fill.marker({"width": 0}),
                customdata=[duration(value) for value in values],
                hovertemplate="%{y}: " + fill.label + " %{customdata}<extra></extra>",
            )
        )
    figure.update_layout(barmode="stack")
    figure.update_xaxes(title_text="milliseconds of a step")
    figure.update_yaxes(type="category", autorange="reversed", showgrid=False)
    bars = figure_of(styled(figure, _HEIGHT + _ROW * len(slowest), _LEFT), "layers")
    details = element("details", element("summary", "All layers"), _layer_table(result))
    note = (
        f"All together: forward {duration(result.forward.median_s)}, backward "
        f"{duration(result.backward.median_s)}, weight update {duration(result.update.median_s)}. "
        f"The figure has the slowest {len(slowest)} of {len(result.layers)}; worker 0's, medians."
    )
    return section("Layers", note, bars, details)


def _layer_table(result: ProfileResult) -> Html:
    head = ("layer", "forward", "quartiles", "backward", "quartiles", "parameters", "kept")
    rows = [
        (
            row.name,
            duration(row.forward.median_s),
            f"{duration(row.forward.lower_s)} to {duration(row.forward.upper_s)}",
            duration(row.backward.median_s),
            f"{duration(row.backward.lower_s)} to {duration(row.backward.upper_s)}",
            f"{row.num_parameters:,}",
            nbytes(row.kept_nbytes),
        )
        for row in result.layers
    ]
    return table(head, rows)


def overheads(result: ProfileResult) -> Html:
    """Return what of a step went into calls and waits."""
    head = ("what", "time a step", "of the step", "calls a step")
    rows = [
        (
            row.what,
            duration(row.seconds),
            share(row.share),
            "" if row.calls is None else number(row.calls),
        )
        for row in result.overheads
    ]
    note = (
        "The first two are those of the recorded steps; the rest is what torch.profiler saw on the "
        "host of worker 0, in steps that it makes slower itself: between operators in steps of "
        "worker 0 alone, calls in steps with the others."
    )
    return section("Calls and waits", note, table(head, rows))


def resources(result: ProfileResult) -> Html:
    """Return how long each resource was busy."""
    head = ("resource", "busy", "idle", "busy, of the step")
    rows = [
        (
            row.resource,
            duration(row.busy_s),
            duration(row.idle_s),
            share(row.busy_s / (row.busy_s + row.idle_s or 1.0)),
        )
        for row in result.resources
    ]
    note = (
        "Per step. Lanes of devices are those of the recorded steps; processor cores are what the "
        "kernel counted for a worker's process, on average over the cores that it may use."
    )
    return section("Resources", note, table(head, rows))


def operators(result: ProfileResult) -> Html:
    """Return torch.profiler's operators, or kernels, by their own time."""
    head = ("operator", "time a step", "of all", "calls a step", "memory taken and kept")
    rows = [
        (row.name, duration(row.seconds), share(row.share), number(row.calls), nbytes(row.nbytes))
        for row in result.operators
    ]
    note = "Worker 0's, without the operators that they call. Memory is negative where it is freed."
    return section("Operators", note, table(head, rows))


def agreement(result: ProfileResult) -> Html:
    """Return our totals beside torch.profiler's."""
    head = ("phase", "sum of our layers", "torch.profiler", "error", "inside operators")
    rows = [
        (
            row.phase,
            duration(row.ours_s),
            duration(row.torch_s),
            share(row.error, signed=True),
            duration(row.in_operators_s),
        )
        for row in result.agreement
    ]
    note = "The same steps, of worker 0 by itself, under both at once; in seconds of such a step."
    return section("Agreement with torch.profiler", note, table(head, rows))


def memory(result: ProfileResult) -> Html:
    """Return what tensors take, and what the workers' processes held."""
    tensors = result.memory
    rows = [
        ("parameters", nbytes(tensors.parameters)),
        ("gradients", nbytes(tensors.gradients)),
        ("momentum", nbytes(tensors.momentum)),
        ("feature maps", nbytes(tensors.features)),
        ("a batch", nbytes(tensors.inputs)),
        ("at most at once, predicted", nbytes(tensors.predicted)),
        ("at most at once, measured", nbytes(tensors.measured)),
        ("error of the prediction", share(tensors.error, signed=True)),
    ]
    held = [
        (
            f"worker {row.worker}",
            nbytes(row.before_nbytes),
            nbytes(row.training_nbytes),
            nbytes(row.training_nbytes - row.before_nbytes),
        )
        for row in result.workers
    ]
    surplus = result.surplus_nbytes
    note = (
        "Tensors of worker 0 as PyTorch's allocator counted them, without the data set; feature "
        "maps are what forward keeps for backward. Below, what each process held."
    )
    if surplus is not None:
        note += f" Worker 0 needs {nbytes(surplus)} more than the others do on average."
    processes = table(("process", "before training", "in training", "more"), held)
    return section("Memory", note, table(("tensors", "bytes"), rows), processes)


def largest(found: LargestBatch) -> Html:
    """Return the largest batch that fits, and what was tried."""
    rows = [
        (f"{row.batch_size:,}", "yes" if row.fits else "no", duration(row.seconds), row.why)
        for row in found.attempts
    ]
    note = (
        f"{found.batch_size:,} samples of one worker fit into {nbytes(found.limit_nbytes)}, to a "
        f"16th; predicted were {found.predicted:,}. Each was tried in a process of its own."
    )
    if not found.complete:
        note += " The search ended at a deadline: larger ones may fit."
    drawn_rows = table(("batch", "fits", "after", "what came of it"), rows, text_columns=(1, 3))
    return section("Largest batch", note, drawn_rows)
