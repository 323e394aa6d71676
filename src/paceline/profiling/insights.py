"""What a profile says: sentences that answer, each with the figures that it rests on."""

from collections.abc import Iterator, Mapping

from paceline.core.insight import Insight
from paceline.profile_result import ProfileResult
from paceline.report.format import duration, nbytes, share

_WORTH = 0.1  # a smaller part of a step is not what limits it
_LIMITS = {
    "computation": "Computation limits: forward and backward take most of a step",
    "communication": "Communication limits: workers wait for gradients in much of a step",
    "calls": "Calls limit: much of a step passes between operators, in Python and in dispatch",
    "update": "The weight update limits: it takes much of a step",
    "loading": "Loading limits: workers wait for their batches in much of a step",
    "idle": "Nothing of the model limits: for much of a step workers neither compute nor exchange",
}


def insights_of(result: ProfileResult) -> Iterator[Insight]:
    """Yield what limits, what to change first, and what memory allows."""
    parts = _shares(result)
    limit = max(parts, key=parts.__getitem__)
    others = {name: part for name, part in parts.items() if name != "computation"}
    worst = max(others, key=others.__getitem__)
    if others[worst] < _WORTH:
        worst = "computation"
    yield Insight("limit", f"{_LIMITS[limit]}.", _figures(parts, result))
    yield _change(worst, parts, result)
    yield _memory(result)


def _shares(result: ProfileResult) -> dict[str, float]:
    """Return which parts of a step went where; what is between operators is no computation."""
    seconds = {row.stage: row.seconds for row in result.stages}
    step = result.stages_s or 1.0
    passes = [row for row in result.agreement if row.phase in ("forward", "backward")]
    between = sum(row.torch_s - row.in_operators_s for row in passes)
    computing = (seconds["forward"] + seconds["backward"]) / step
    calls = computing * between / (sum(row.torch_s for row in passes) or 1.0)
    return {
        "computation": computing - calls,
        "communication": seconds["exposed"] / step,
        "calls": calls,
        "update": seconds["update"] / step,
        "loading": seconds["load"] / step,
        "idle": seconds["idle"] / step,
    }


def _figures(parts: Mapping[str, float], result: ProfileResult) -> tuple[tuple[str, str], ...]:
    shown = sorted(parts.items(), key=lambda item: -item[1])[:3]
    return (
        ("step", duration(result.step.median_s)),
        *((name, f"{share(part)} of a step") for name, part in shown),
    )


def _change(worst: str, parts: Mapping[str, float], result: ProfileResult) -> Insight:
    step_s = result.step.median_s
    without_s = step_s * (1 - parts[worst])
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
        )
    advice, cost = {
        "communication": (
            "hide or shrink the exchange (another --strategy, a codec), or give each worker larger "
            "batches",
            "exposed communication",
        ),
        "calls": (
            "take larger batches, of which the calls cost the same, or fewer and larger layers",
            "the time between operators",
        ),
        "update": ("take larger batches, which need fewer updates", "the weight update"),
        "loading": ("load beside training, or keep the data in memory", "loading"),
        "idle": ("find in the timeline what the workers wait for", "idle time"),
    }[worst]
    gain = step_s / without_s if without_s > 0 else float("inf")
    return Insight(
        "change",
        f"First {advice}: without {cost} a step would take {duration(without_s)}, {gain:.2f} times "
        "as fast.",
        ((worst, f"{share(parts[worst])} of a step"), ("step", duration(step_s))),
    )


def _memory(result: ProfileResult) -> Insight:
    memory = result.memory
    copies = memory.parameters + memory.gradients + memory.momentum
    if memory.features > copies:
        sentence = (
            f"Feature maps take most of the memory, {memory.features / copies:.1f} times what "
            "parameters, gradients and momentum take: it grows with the batch."
        )
    else:
        sentence = (
            "Parameters, gradients and momentum take most of the memory, "
            f"{copies / max(1, memory.features):.1f} times what feature maps take: a larger batch "
            "costs little."
        )
    figures: list[tuple[str, str]] = [
        ("feature maps", nbytes(memory.features)),
        ("parameters, gradients, momentum", nbytes(copies)),
        ("at most at once", nbytes(memory.measured)),
    ]
    if result.largest is not None:
        largest = result.largest
        at_least = "" if largest.complete else " at least"
        sentence += (
            f" The largest batch of a worker that fits into {nbytes(largest.limit_nbytes)} is"
            f"{at_least} {largest.batch_size:,}."
        )
        figures.append(("largest batch predicted", f"{largest.predicted:,}"))
    return Insight("memory", sentence, tuple(figures))
