"""The page of a profile: the time of a step, its waits, its memory, the largest batch."""

from collections.abc import Iterator
from pathlib import Path

from paceline.core.plan import Kind
from paceline.record.trace import read_trace
from paceline.records.profile import LargestBatch, ProfileResult, Quartiles
from paceline.report.figures import (
    KINDS,
    PARTS,
    Panel,
    bars_along,
    escaped,
    figure_element,
    figure_of,
)
from paceline.report.format import (
    change_text,
    counted,
    duration,
    nbytes,
    number,
    ratio,
    share,
)
from paceline.report.markup import Drawn, Html, facts, folded, header, insights, section, table
from paceline.report.steps import two_steps

_MOST_BARS = 30  # layers of the figure, the slowest ones; the table has all
_HEIGHT, _ROW = 130, 22  # pixels
_MILLISECONDS = "milliseconds of a step"


def drawn(result: ProfileResult, folder: Path) -> Drawn:
    """Return the page of a profile."""
    timelines = list(read_trace(folder / "trace.json").values())
    body = [
        _header(result),
        insights(result.insights),
        _stages(result),
        _layers(result),
        *_tables(result),
        _memory(result),
        *([] if result.largest is None else [_largest(result.largest)]),
        two_steps(timelines),
        facts(result.settings, result.machine, result.peak_memory_bytes),
    ]
    return f"{result.settings.model}, profile {result.id}", body


def _header(result: ProfileResult) -> Html:
    settings, step, memory = result.settings, result.step, result.memory
    data = "" if settings.data is None else f" on {settings.data}"
    line = (
        f"profiled{data}, strategy {settings.strategy}, "
        f"{counted(settings.workers, 'worker')}, {settings.batch_size} samples a step"
    )
    exposed = next((row.seconds for row in result.stages if row.stage == "exposed"), 0.0)
    quartiles = f"quartiles {duration(step.lower_s)} and {duration(step.upper_s)}"
    tiles = (
        ("step", duration(step.median_s), quartiles),
        ("samples/s", number(result.samples_per_s), "measured, not recorded"),
        ("exposed", share(ratio(exposed, result.stages_s)), "communication, of a step"),
        ("memory", nbytes(memory.measured), f"of tensors; {nbytes(memory.predicted)} predicted"),
        ("recording", change_text(result.cost), "recorded steps beside others"),
    )
    return header(settings.model, line, result.id, tiles)


def stage_rows(result: ProfileResult) -> list[tuple[str, ...]]:
    """Return the name, the time and the share of each part of a step, and their sum."""
    rows = []
    for row in result.stages:
        part = "beside it" if row.stage == "hidden" else share(ratio(row.seconds, result.stages_s))
        rows.append((row.stage, duration(row.seconds), part))
    return [*rows, ("sum", duration(result.stages_s), share(1.0))]


def overhead_rows(result: ProfileResult) -> list[tuple[str, ...]]:
    """Return the name, the time, the share and the number of all calls and waits of a step."""
    rows: list[tuple[str, ...]] = []
    for row in result.overheads:
        calls = "" if row.calls is None else number(row.calls)
        rows.append((row.what, duration(row.seconds), share(row.share), calls))
    return rows


def operator_rows(result: ProfileResult) -> list[tuple[str, ...]]:
    """Return the name, the time, the share, the calls and the memory of each operator."""
    return [
        (row.name, duration(row.seconds), share(row.share), number(row.calls), nbytes(row.nbytes))
        for row in result.operators
    ]


def _stages(result: ProfileResult) -> Html:
    bars, end = [], 0.0
    for row in result.stages:
        if row.stage == "hidden" or not row.seconds:
            continue
        fill = PARTS[row.stage]
        told = [f"{fill.label} {duration(row.seconds)}"]
        place = {"y": [""], "base": [1e3 * end], "marker": fill.marker({"width": 0})}
        bars.append(bars_along(fill, [1e3 * row.seconds], told, **place))
        end += row.seconds
    panel = Panel(bars, {"title": _MILLISECONDS})
    figure = figure_of([panel], _HEIGHT, margin={"l": 12}, barmode="overlay")
    note = (
        "Means over the workers and over the recorded steps, the middle half of them. Hidden "
        "communication runs beside computation and adds nothing. The sum is "
        f"{change_text(result.stages_error)} off the recorded steps by the clock, "
        f"{duration(result.recorded_typical_s)}."
    )
    named = {name: fill.label for name, fill in PARTS.items()}
    rows = [(named.get(name, name), *rest) for name, *rest in stage_rows(result)]
    bar = figure_element(figure, "stages")
    return section("Where a step goes", note, bar, table(("part", "time", "of the step"), rows))


def _layers(result: ProfileResult) -> Html:
    slowest = sorted(result.layers, key=lambda row: row.median_s, reverse=True)[:_MOST_BARS]
    names, bars = [escaped(row.name) for row in slowest], []
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        fill = KINDS[kind]
        values = [getattr(row, kind).median_s for row in slowest]
        told = [f"{n}: {fill.label} {duration(s)}" for n, s in zip(names, values, strict=True)]
        marker = fill.marker({"width": 0})
        bars.append(bars_along(fill, [1e3 * s for s in values], told, y=names, marker=marker))
    y = {"type": "category", "autorange": "reversed", "showgrid": False}
    panel = Panel(bars, {"title": _MILLISECONDS}, y)
    figure = figure_of([panel], _HEIGHT + _ROW * len(slowest), barmode="stack")
    drawn = figure_element(figure, "layers")
    head = ("layer", "forward", "quartiles", "backward", "quartiles", "parameters", "kept")
    rows = []
    for row in result.layers:
        times = *_spread(row.forward), *_spread(row.backward)
        rows.append((row.name, *times, f"{row.num_parameters:,}", nbytes(row.kept_nbytes)))
    note = (
        f"All together: forward {duration(result.forward.median_s)}, backward "
        f"{duration(result.backward.median_s)}, weight update {duration(result.update.median_s)}. "
        f"The figure has the slowest {len(slowest)} of {len(result.layers)}; worker 0's, medians."
    )
    return section("Layers", note, drawn, folded("All layers", table(head, rows)))


def _spread(times: Quartiles) -> tuple[str, str]:
    return duration(times.median_s), f"{duration(times.lower_s)} to {duration(times.upper_s)}"


def _tables(result: ProfileResult) -> Iterator[Html]:
    """Yield the sections that are tables: calls and waits, resources, operators, agreement."""
    head: tuple[str, ...] = ("what", "time a step", "of the step", "calls a step")
    note = (
        "The first two are those of the recorded steps; the rest is what torch.profiler saw on the "
        "host of worker 0, in steps that it makes slower itself: between operators in steps of "
        "worker 0 alone, calls in steps with the others."
    )
    yield section("Calls and waits", note, table(head, overhead_rows(result)))

    rows: list[tuple[str, ...]] = []
    for one in result.resources:
        busy = share(one.busy_s / (one.busy_s + one.idle_s or 1.0))
        rows.append((one.resource, duration(one.busy_s), duration(one.idle_s), busy))
    note = (
        "Per step. Lanes of devices are those of the recorded steps; processor cores are what the "
        "operating system counted for a worker's process, on average over the cores that it may "
        "use."
    )
    if result.kernels_s is not None:
        of_step = result.kernels_s / result.step.median_s
        idle_s = max(0.0, result.step.median_s - result.kernels_s)
        times = duration(result.kernels_s), duration(idle_s)
        rows.append(("kernels of worker 0's GPU", *times, share(of_step)))
        note += (
            " A lane of a GPU is busy from one layer to the next; kernels, which torch.profiler "
            "counts, do not fill it where the GPU waits for the host to launch the next one."
        )
    yield section("Resources", note, table(("resource", "busy", "idle", "busy, of the step"), rows))

    head = ("operator", "time a step", "of all", "calls a step", "memory taken and kept")
    note = "Worker 0's, without the operators that they call. Memory is negative where it is freed."
    yield section("Operators", note, table(head, operator_rows(result)))

    head = ("phase", "sum of our layers", "torch.profiler", "error", "inside operators")
    rows = []
    for row in result.agreement:
        error, inside = change_text(row.error), duration(row.in_operators_s)
        rows.append((row.phase, duration(row.ours_s), duration(row.torch_s), error, inside))
    note = "The same steps, of worker 0 by itself, under both at once; in seconds of such a step."
    if rows:
        yield section("Agreement with torch.profiler", note, table(head, rows))


def _memory(result: ProfileResult) -> Html:
    tensors = result.memory
    rows = [
        ("parameters", nbytes(tensors.parameters)),
        ("gradients", nbytes(tensors.gradients)),
        ("momentum", nbytes(tensors.momentum)),
        ("feature maps", nbytes(tensors.features)),
        ("a batch", nbytes(tensors.inputs)),
        ("at most at once, predicted", nbytes(tensors.predicted)),
        ("at most at once, measured", nbytes(tensors.measured)),
        ("error of the prediction", change_text(tensors.error)),
    ]
    held = []
    for row in result.workers:
        before, during = row.before_nbytes, row.training_nbytes
        held.append((f"worker {row.worker}", *map(nbytes, (before, during, during - before))))
    note = (
        "Tensors of worker 0 as PyTorch's allocator counted them, without the data set; feature "
        "maps are what forward keeps for backward. Below, what each process held."
    )
    if (surplus := surplus_sentence(result)) is not None:
        note += f" {surplus}."
    processes = table(("process", "before training", "in training", "more"), held)
    return section("Memory", note, table(("tensors", "bytes"), rows), processes)


def surplus_sentence(result: ProfileResult) -> str | None:
    """Return what worker 0 needs beside the others, without its full stop; None if it is alone."""
    surplus = result.surplus_nbytes
    if surplus is None:
        return None
    others = "worker 1" if len(result.workers) == 2 else "the others on average"
    if not surplus:
        return f"Worker 0 needs as much memory as {others}"
    more = f"{nbytes(abs(surplus))} {'more' if surplus > 0 else 'less'}"
    return f"Worker 0 needs {more} than {others}"


def _largest(found: LargestBatch) -> Html:
    rows = [
        (f"{row.batch_size:,}", "yes" if row.fits else "no", duration(row.seconds), row.why)
        for row in found.attempts
    ]
    note = (
        f"{largest_sentence(found)}; predicted were {found.predicted:,}. The search ends at a 16th "
        "of the batch. Each was tried in a process of its own."
    )
    attempts = table(("batch", "fits", "after", "what came of it"), rows, text_columns=(1, 3))
    return section("Largest batch", note, attempts)


def largest_sentence(found: LargestBatch) -> str:
    """Return the outcome of the search for the largest batch, without its full stop."""
    limit = nbytes(found.limit_nbytes)
    if found.batch_size:
        at_least = "" if found.complete else " at least"
        sentence = f"The largest batch of a worker that fits into {limit} is{at_least} "
        sentence += f"{found.batch_size:,}"
    else:
        least = min(found.attempts, key=lambda row: row.batch_size)
        sentence = f"No batch was seen to fit into {limit}: {least.batch_size:,} samples "
        sentence += f"did not ({least.why})"
    return sentence if found.complete else f"{sentence}; the search ended at a deadline"
