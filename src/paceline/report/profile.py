"""Show a profile in a terminal or as an HTML page."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table as TerminalTable

from paceline.core.plan import Kind
from paceline.record.trace import read_trace
from paceline.records.profile import LargestBatch, LayerRow, OperatorRow, ProfileResult, Quartiles
from paceline.report import advice, figures
from paceline.report.figures import KINDS, Described, Panel, bars_along, escaped, step_parts
from paceline.report.format import change_text, counted, duration, nbytes, number, ratio, share
from paceline.report.page import Page, facts
from paceline.report.steps import two_steps
from paceline.report.tables import Rows, Table, part_name
from paceline.report.terminal import shown

_MOST_BARS = 30  # maximum layers in the figure; the table has all layers
_LAYERS_SHOWN, _OPERATORS_SHOWN = 12, 8  # maximum rows of tables in a terminal
_HEIGHT, _ROW = 130, 22  # pixels: height of the figure without its bars, and of each bar


def page_of(result: ProfileResult, folder: Path) -> Page:
    """Build the HTML page of a profile; `folder` contains trace.json."""
    layers = slowest_layers(result)[:_MOST_BARS]
    largest = result.largest
    content: dict[str, Any] = {
        "result": result,
        "line": _line(result),
        "tiles": _tiles(result),
        "stages_figure": step_parts({"step": {row.stage: row.seconds for row in result.stages}}),
        "stages": stages_table(result),
        "layers_figure": _layers_figure(layers),
        "most_bars": len(layers),
        "layers": layers_table(result.layers),
        "overheads": overheads_table(result),
        "resources": _resources(result),
        "operators": operators_table(result.operators),
        "agreement": _agreement(result) if result.agreement else None,
        "tensors": _tensors(result),
        "processes": _processes(result),
        "surplus": surplus_sentence(result),
        "largest": None if largest is None else largest_sentence(largest),
        "attempts": None if largest is None else _attempts(largest),
        "steps": two_steps(list(read_trace(folder / "trace.json").values())),
        "settings": facts(result.settings, result.machine, result.peak_memory_bytes),
    }
    return Page(f"{result.settings.model}, profile {result.id}", "profile.html", content)


def _line(result: ProfileResult) -> str:
    settings = result.settings
    data = "" if settings.data is None else f" on {settings.data}"
    return (
        f"profiled{data}, strategy {settings.strategy}, "
        f"{counted(settings.workers, 'worker')}, {settings.batch_size} samples a step"
    )


def _tiles(result: ProfileResult) -> list[tuple[str, str, str]]:
    step, memory = result.step, result.memory
    exposed = next((row.seconds for row in result.stages if row.stage == "exposed"), 0.0)
    quartiles = f"quartiles {duration(step.lower_s)} and {duration(step.upper_s)}"
    predicted = f"{nbytes(memory.predicted)} ({change_text(memory.error)})"
    off = change_text(result.stages_error)
    return [
        ("step", duration(step.median_s), quartiles),
        ("samples/s", number(result.samples_per_s), "of steps that were not recorded"),
        ("exposed", share(ratio(exposed, result.stages_s)), "of a step is communication"),
        ("memory", nbytes(memory.measured), f"of tensors; predicted {predicted}"),
        ("recording", change_text(result.cost), f"of a step; error of the sum of parts: {off}"),
    ]


def stages_table(result: ProfileResult) -> Table:
    """Return a table of the parts of a step, such as forward, with their time and their sum."""
    rows: Rows = []
    for row in result.stages:
        part = "hidden" if row.stage == "hidden" else share(ratio(row.seconds, result.stages_s))
        rows.append((part_name(row.stage), duration(row.seconds), part))
    rows.append(("sum", duration(result.stages_s), share(1.0)))
    return Table(("part", "time", "of the step"), rows)


def overheads_table(result: ProfileResult) -> Table:
    """Return a table of the time of waits, calls and host overheads in a step."""
    rows: Rows = []
    for row in result.overheads:
        calls = "" if row.calls is None else number(row.calls)
        rows.append((row.what, duration(row.seconds), share(row.share), calls))
    return Table(("what", "time a step", "of the step", "calls a step"), rows)


def operators_table(operators: Sequence[OperatorRow]) -> Table:
    """Return a table of PyTorch operators: time and calls per step, share of time, and memory."""
    rows: Rows = [
        (row.name, duration(row.seconds), share(row.share), number(row.calls), nbytes(row.nbytes))
        for row in operators
    ]
    head = ("operator", "time a step", "of all", "calls a step", "memory kept")
    return Table(head, rows)


def slowest_layers(result: ProfileResult) -> list[LayerRow]:
    """Return the layers sorted by their time in a step, the slowest first."""
    return sorted(result.layers, key=lambda row: row.median_s, reverse=True)


def layers_table(layers: Sequence[LayerRow]) -> Table:
    """Return a table of layers: times, parameters and tensors kept for backward (feature maps)."""
    rows: Rows = []
    for row in layers:
        times = *_spread(row.forward), *_spread(row.backward)
        rows.append((row.name, *times, f"{row.num_parameters:,}", nbytes(row.kept_nbytes)))
    head = ("layer", "forward", "quartiles", "backward", "quartiles", "parameters", "kept")
    return Table(head, rows)


def _layers_figure(slowest: Sequence[LayerRow]) -> Described:
    names, bars = [escaped(row.name) for row in slowest], []
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        fill = KINDS[kind]
        values = [getattr(row, kind).median_s for row in slowest]
        told = [f"{n}: {fill.label} {duration(s)}" for n, s in zip(names, values, strict=True)]
        marker = fill.marker({"width": 0})
        bars.append(bars_along(fill, [1e3 * s for s in values], told, y=names, marker=marker))
    y = {"type": "category", "autorange": "reversed", "showgrid": False}
    panel = Panel(bars, {"title": "time per step, ms"}, y)
    return figures.figure_of([panel], _HEIGHT + _ROW * len(slowest), barmode="stack")


def _spread(times: Quartiles) -> tuple[str, str]:
    return duration(times.median_s), f"{duration(times.lower_s)} to {duration(times.upper_s)}"


def _resources(result: ProfileResult) -> Table:
    rows: Rows = []
    for one in result.resources:
        busy = share(one.busy_s / (one.busy_s + one.idle_s or 1.0))
        rows.append((one.resource, duration(one.busy_s), duration(one.idle_s), busy))
    if result.kernels_s is not None:
        of_step = result.kernels_s / result.step.median_s
        idle_s = max(0.0, result.step.median_s - result.kernels_s)
        times = duration(result.kernels_s), duration(idle_s)
        rows.append(("kernels of worker 0's GPU", *times, share(of_step)))
    return Table(("resource", "busy", "idle", "busy, of the step"), rows)


def _agreement(result: ProfileResult) -> Table:
    rows: Rows = []
    for row in result.agreement:
        error, inside = change_text(row.error), duration(row.in_operators_s)
        rows.append((row.phase, duration(row.ours_s), duration(row.torch_s), error, inside))
    head = ("phase", "sum of our layers", "torch.profiler", "error", "inside operators")
    return Table(head, rows)


def _tensors(result: ProfileResult) -> Table:
    tensors = result.memory
    held = {
        "parameters": tensors.parameters,
        "gradients": tensors.gradients,
        "momentum": tensors.momentum,
        "feature maps": tensors.features,
        "a batch": tensors.inputs,
        "at most at once, predicted": tensors.predicted,
        "at most at once, measured": tensors.measured,
    }
    rows: Rows = [(name, nbytes(count)) for name, count in held.items()]
    rows.append(("error of the prediction", change_text(tensors.error)))
    return Table(("tensors", "bytes"), rows)


def _processes(result: ProfileResult) -> Table:
    rows: Rows = []
    for row in result.workers:
        before, during = row.before_nbytes, row.training_nbytes
        rows.append((f"worker {row.worker}", *map(nbytes, (before, during, during - before))))
    return Table(("process", "before training", "in training", "more"), rows)


def surplus_sentence(result: ProfileResult) -> str | None:
    """Return a sentence on worker 0's memory relative to other workers'; None for one worker."""
    surplus = result.surplus_nbytes
    if surplus is None:
        return None
    others = "worker 1" if len(result.workers) == 2 else "the others on average"
    if not surplus:
        return f"Worker 0 needs as much memory as {others}"
    more = f"{nbytes(abs(surplus))} {'more' if surplus > 0 else 'less'}"
    return f"Worker 0 needs {more} than {others}"


def _attempts(found: LargestBatch) -> Table:
    rows: Rows = [
        (f"{row.batch_size:,}", "yes" if row.fits else "no", duration(row.seconds), row.why)
        for row in found.attempts
    ]
    return Table(("batch", "fits", "after", "outcome"), rows, (1, 3))


def largest_sentence(found: LargestBatch) -> str:
    """Return a sentence with the result of the search for the largest batch."""
    limit = nbytes(found.limit_nbytes)
    if found.batch_size:
        at_least = "" if found.complete else " at least"
        sentence = f"The largest batch of a worker that fits into {limit} is{at_least} "
        sentence += f"{found.batch_size:,}"
    else:
        least = min(found.attempts, key=lambda row: row.batch_size)
        sentence = f"No tried batch fits into {limit}: {least.batch_size:,} samples "
        sentence += f"failed ({least.why})"
    sentence += "" if found.complete else "; the search ended at a deadline"
    return f"{sentence}; predicted: {found.predicted:,}"


def tables(result: ProfileResult) -> Iterator[TerminalTable]:
    """Yield terminal tables of a step's parts, the slowest layers, waits, and operators."""
    yield shown("Where a step goes", stages_table(result), gap=2)
    layers = layers_table(slowest_layers(result)[:_LAYERS_SHOWN]).without("quartiles")
    yield shown(f"The slowest of {len(result.layers)} layers", layers, gap=2)
    yield shown("Calls and waits", overheads_table(result), gap=2)
    operators = operators_table(result.operators[:_OPERATORS_SHOWN])
    operators = operators.without("memory kept")
    yield shown("Operators, by torch.profiler", operators, gap=2)


def summary(result: ProfileResult, folder: str) -> str:
    """Summarize a profile in a few lines, with advice and the files written to `folder`."""
    lines = [f"{name:<10} {value}, {note}" for name, value, note in _tiles(result)]
    if (surplus := surplus_sentence(result)) is not None:
        lines.append(f"surplus    {surplus}")
    if result.largest is not None:
        lines.append(f"largest    {largest_sentence(result.largest)}")
    lines += [f"advice     {message}" for message in advice.shown(result.findings)]
    return "\n".join([*lines, f"written    {folder}/result.json, trace.json, report.html"])
