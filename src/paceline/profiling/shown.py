"""A profile as a terminal shows it."""

from collections.abc import Iterator

from rich.table import Table

from paceline.profile_result import ProfileResult
from paceline.report.format import duration, nbytes, number, share

_MOST_LAYERS = 12
_MOST_OPERATORS = 8


def tables(result: ProfileResult) -> Iterator[Table]:
    """Yield the stages, the slowest layers, the waits and the operators."""
    yield _stages(result)
    yield _layers(result)
    yield _overheads(result)
    yield _operators(result)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left")
    return table


def _stages(result: ProfileResult) -> Table:
    table = _table("Where a step goes", "", "time", "of the step")
    for row in result.stages:
        part = "beside it" if row.stage == "hidden" else share(row.seconds / result.stages_s)
        table.add_row(row.stage, duration(row.seconds), part)
    table.add_row("sum", duration(result.stages_s), share(1.0))
    return table


def _layers(result: ProfileResult) -> Table:
    slowest = sorted(result.layers, key=lambda row: row.median_s, reverse=True)
    title = f"The slowest of {len(slowest)} layers"
    table = _table(title, "layer", "forward", "backward", "parameters", "kept")
    for row in slowest[:_MOST_LAYERS]:
        table.add_row(
            row.name,
            duration(row.forward.median_s),
            duration(row.backward.median_s),
            f"{row.num_parameters:,}",
            nbytes(row.kept_nbytes),
        )
    return table


def _overheads(result: ProfileResult) -> Table:
    table = _table("Calls and waits", "", "time a step", "of the step", "calls")
    for row in result.overheads:
        calls = "" if row.calls is None else number(row.calls)
        table.add_row(row.what, duration(row.seconds), share(row.share), calls)
    return table


def _operators(result: ProfileResult) -> Table:
    table = _table("Operators, by torch.profiler", "operator", "time a step", "of all", "calls")
    for row in result.operators[:_MOST_OPERATORS]:
        table.add_row(row.name, duration(row.seconds), share(row.share), number(row.calls))
    return table


def summary(result: ProfileResult, folder: str) -> str:
    """Return what a profile found, in a few lines."""
    step, memory = result.step, result.memory
    lines = [
        f"step       {duration(step.median_s)}, half lie in {duration(step.lower_s)} to "
        f"{duration(step.upper_s)}; {number(result.samples_per_s)} samples/s",
        f"recording  {share(result.cost, signed=True)} of a step; the stages' sum is "
        f"{share(result.stages_error, signed=True)} off",
        f"memory     {nbytes(memory.measured)} of tensors at most, predicted "
        f"{nbytes(memory.predicted)} ({share(memory.error, signed=True)})",
    ]
    if result.surplus_nbytes is not None:
        lines.append(f"surplus    worker 0 needs {nbytes(result.surplus_nbytes)} more than others")
    if result.largest is not None:
        lines.append(
            f"largest    a batch of {result.largest.batch_size:,} fits into "
            f"{nbytes(result.largest.limit_nbytes)}; predicted {result.largest.predicted:,}"
        )
    lines += [f"{row.topic:<10} {row.sentence}" for row in result.insights]
    return "\n".join([*lines, f"written    {folder}/result.json, trace.json, report.html"])
