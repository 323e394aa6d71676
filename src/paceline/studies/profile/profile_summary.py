"""Show a profile in a terminal: tables, a summary and advice."""

from collections.abc import Iterator

from rich.table import Table

from paceline.records.profile import ProfileResult
from paceline.report import advice
from paceline.report.format import change_text, duration, nbytes, number
from paceline.report.profile import (
    largest_sentence,
    layers_table,
    operators_table,
    overheads_table,
    slowest_layers,
    stages_table,
    surplus_sentence,
)
from paceline.report.terminal import shown

_MOST_LAYERS = 12
_MOST_OPERATORS = 8


def tables(result: ProfileResult) -> Iterator[Table]:
    """Yield tables of the stages, slowest layers, waits and operators."""
    yield shown("Where a step goes", stages_table(result), gap=2)
    layers = layers_table(slowest_layers(result)[:_MOST_LAYERS]).without("quartiles")
    yield shown(f"The slowest of {len(result.layers)} layers", layers, gap=2)
    yield shown("Calls and waits", overheads_table(result), gap=2)
    operators = operators_table(result).first(_MOST_OPERATORS).without("memory taken and kept")
    yield shown("Operators, by torch.profiler", operators, gap=2)


def summary(result: ProfileResult, folder: str) -> str:
    """Summarize a profile in a few lines, with advice."""
    step, memory = result.step, result.memory
    lines = [
        f"step       {duration(step.median_s)}, half lie in {duration(step.lower_s)} to "
        f"{duration(step.upper_s)}; {number(result.samples_per_s)} samples/s",
        f"recording  {change_text(result.cost)} of a step; the stages' sum is "
        f"{change_text(result.stages_error)} off",
        f"memory     {nbytes(memory.measured)} of tensors at most, predicted "
        f"{nbytes(memory.predicted)} ({change_text(memory.error)})",
    ]
    if (surplus := surplus_sentence(result)) is not None:
        lines.append(f"surplus    {surplus}")
    if result.largest is not None:
        predicted = f"{result.largest.predicted:,}"
        lines.append(f"largest    {largest_sentence(result.largest)}; predicted {predicted}")
    lines += [f"advice     {message}" for message in advice.shown(result.findings)]
    return "\n".join([*lines, f"written    {folder}/result.json, trace.json, report.html"])
