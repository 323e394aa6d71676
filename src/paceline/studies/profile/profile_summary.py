"""State the findings of a profile, in sentences and in tables."""

import tomllib
from collections.abc import Iterator
from pathlib import Path

from rich.table import Table

from paceline.core.losses import busy_warning
from paceline.core.outcome import Insight
from paceline.records.profile import ProfileResult
from paceline.report.format import change_text, duration, nbytes, number, share
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

_WORTH = 0.1  # a smaller share of a step is not worth a change
# By the part of a step.
_WORDS: dict[str, dict[str, str]] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)
_MOST = 0.5  # of a step; a larger share is the largest without saying so
_MOST_LAYERS = 12
_MOST_OPERATORS = 8


def insights_of(result: ProfileResult) -> Iterator[Insight]:
    """Yield the limit of a step, the first change to make, and the limit of memory.

    If other programs ran beside the steps, that comes first.
    """
    yield from _unrest(result)
    parts = _shares(result)
    limit = max(parts, key=parts.__getitem__)
    others = {name: part for name, part in parts.items() if name != "computation"}
    worst = max(others, key=others.__getitem__)
    if others[worst] < _WORTH:
        worst = "computation"
    largest = sorted(parts.items(), key=lambda item: -item[1])[:3]
    figures = (
        ("step", duration(result.step.median_s)),
        *((name, f"{share(part)} of a step") for name, part in largest),
    )
    sentence = _WORDS[limit]["limits"].format(share=share(parts[limit]))
    if parts[limit] <= _MOST:
        sentence += ", more than any other part"
    yield Insight("limit", f"{sentence}.", figures, f"limit.{limit}")
    yield _change(worst, parts[worst], result)
    yield _memory(result)


def _unrest(result: ProfileResult) -> Iterator[Insight]:
    so = "all that follows is as uncertain, although twice as many were taken"
    warning = busy_warning(result.unrest, "half of the steps", so)
    if warning is not None:
        figures = (("half of the steps", f"±{share(result.unrest, 0)} around their median"),)
        yield Insight("machine", f"{warning[0].upper()}{warning[1:]}.", figures, "machine.busy")


def _shares(result: ProfileResult) -> dict[str, float]:
    """Return the shares of a step.

    Time between operators, and between a GPU's kernels, counts as calls and not as computation.
    """
    seconds = {row.stage: row.seconds for row in result.stages}
    step = result.stages_s or 1.0
    computing = (seconds["forward"] + seconds["backward"]) / step
    if result.kernels_s is None:
        passes = [row for row in result.agreement if row.phase in ("forward", "backward")]
        between = sum(row.torch_s - row.in_operators_s for row in passes)
        calls = computing * between / (sum(row.torch_s for row in passes) or 1.0)
    else:
        # Kernels are those of the whole step, and its gaps those of all that the device does.
        busy = computing + (seconds["load"] + seconds["update"]) / step
        calls = min(computing, max(0.0, busy - result.kernels_s / step))
    return {
        "computation": computing - calls,
        "communication": seconds["exposed"] / step,
        "calls": calls,
        "update": seconds["update"] / step,
        "loading": seconds["load"] / step,
        "idle": seconds["idle"] / step,
    }


def _change(worst: str, lost: float, result: ProfileResult) -> Insight:
    step_s = result.step.median_s
    without_s = step_s * (1 - lost)
    if worst == "computation":
        slowest = max(result.layers, key=lambda row: row.median_s)
        part = slowest.median_s / result.stages_s
        figures = [(f"layer {slowest.name}", f"{share(part)} of a step")]
        if result.operators:
            first = result.operators[0]
            figures.append((first.name, f"{share(first.share)} of the operators"))
        return Insight(
            "change",
            f"Change the arithmetic first: layer {slowest.name} alone takes {share(part)} of a "
            "step, and no other cost is worth 10 %.",
            tuple(figures),
            "change.computation",
        )
    words = _WORDS[worst]
    gain = step_s / without_s if without_s > 0 else float("inf")
    return Insight(
        "change",
        f"First {words['remedy']}: without {words['cost']} a step would take "
        f"{duration(without_s)}, at best {gain:.2f} times as fast.",
        ((worst, f"{share(lost)} of a step"), ("step", duration(step_s))),
        f"change.{worst}",
    )


def _memory(result: ProfileResult) -> Insight:
    memory = result.memory
    copies = memory.parameters + memory.gradients + memory.momentum
    held = "parameters, gradients and momentum"
    sentence = f"Feature maps take {nbytes(memory.features)}, {held} {nbytes(copies)}"
    if memory.features > copies:
        sentence += f": {memory.features / copies:.1f} times as much, which grows with the batch."
        code = "memory.features"
    else:
        grown = nbytes(memory.features)
        sentence += f", whatever the batch: one twice as large needs at least {grown} more."
        code = "memory.parameters"
    figures: list[tuple[str, str]] = [
        ("feature maps", nbytes(memory.features)),
        ("parameters, gradients, momentum", nbytes(copies)),
        ("at most at once", nbytes(memory.measured)),
    ]
    if result.largest is not None:
        sentence += f" {largest_sentence(result.largest)}."
        figures.append(("largest batch predicted", f"{result.largest.predicted:,}"))
    return Insight("memory", sentence, tuple(figures), code)


def tables(result: ProfileResult) -> Iterator[Table]:
    """Yield the stages, the slowest layers, the waits and the operators, for a terminal."""
    yield shown("Where a step goes", stages_table(result), boxed=False)
    layers = layers_table(slowest_layers(result)[:_MOST_LAYERS]).without("quartiles")
    yield shown(f"The slowest of {len(result.layers)} layers", layers, boxed=False)
    yield shown("Calls and waits", overheads_table(result), boxed=False)
    operators = operators_table(result).first(_MOST_OPERATORS).without("memory taken and kept")
    yield shown("Operators, by torch.profiler", operators, boxed=False)


def summary(result: ProfileResult, folder: str) -> str:
    """Return the findings of a profile in a few lines."""
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
    lines += [f"{row.topic:<10} {row.sentence}" for row in result.insights]
    return "\n".join([*lines, f"written    {folder}/result.json, trace.json, report.html"])
