"""What a run of workers in step says: whether it is good, and what should be changed.

All is computed from the saved result. "Would" is arithmetic with the parts of a typical step: what
computes a worker's samples divides among workers, all else stays as it is.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

from paceline.core.breakdown import Breakdown, breakdown_by_device
from paceline.core.insight import Insight
from paceline.core.timeline import Origin, Timeline
from paceline.planner import ERROR_BAR
from paceline.report.format import duration, nbytes, share
from paceline.report.learned import of_epochs
from paceline.result import ComparisonTable, PlanRow, RehearsalResult, Result

_GOOD, _FAIR = 0.9, 0.7  # shares of a step that are forward and backward passes
_WORTH = 0.03  # of a step: less is not worth a change
_UNEVEN = 1.15  # times the mean
_FULL = 0.8  # of the memory


@dataclass(frozen=True)
class Facts:
    """A run or a rehearsal of it, as its answers need it.

    `parts` are those of a typical traced step, on average over the devices; `slowest` is by how
    many times the slowest device computes longer than they do on average. `plans` are the others
    that were predicted for as many workers, with a codec or without.
    """

    origin: Origin
    strategy: str
    workers: int
    step_s: float
    predicted_step_s: float
    parts: Breakdown
    slowest: float
    plans: tuple[PlanRow, ...]
    balanced: bool

    @property
    def traced_s(self) -> float:
        """The traced step, which the parts but the hidden one add up to."""
        return self.parts.compute_s + self.parts.exposed_s + self.parts.idle_s

    @property
    def divides_s(self) -> float:
        """What of a step another worker would take a part of."""
        return self.parts.load_s + self.parts.forward_s + self.parts.backward_s

    def times(self, saved_s: float) -> float:
        """How many times as fast a step would be, with so much less in it."""
        left = self.traced_s - saved_s
        return self.traced_s / left if left > 0 else float("inf")


def of_run(
    result: Result | RehearsalResult, timelines: Mapping[Origin, Timeline]
) -> Iterator[Insight]:
    """Yield what is to be said of a run or a rehearsal, the most important first."""
    facts = _facts(result, timelines)
    if facts.traced_s > 0:
        yield _limit(facts)
        yield _change(facts)
        yield _method(facts)
        if not facts.balanced:
            yield _workers(facts)
    if isinstance(result, Result):
        yield from of_epochs(result.epochs, result.score)
        yield from _memory(result)


def _facts(result: Result | RehearsalResult, timelines: Mapping[Origin, Timeline]) -> Facts:
    origin: Origin = "measured"
    plans: tuple[PlanRow, ...] = ()
    if isinstance(result, RehearsalResult):
        origin, strategy, step_s = "rehearsed", result.settings.strategy, result.rehearsed_step_s
    else:
        strategy, step_s, plans = result.strategy, result.measured_step_s, result.plans
    return Facts(
        origin=origin,
        strategy=strategy,
        workers=result.settings.workers,
        step_s=step_s,
        predicted_step_s=result.predicted_step_s,
        parts=_parts(result.comparison),
        slowest=_slowest(timelines.get(origin)),
        plans=tuple(
            plan
            for plan in plans
            if plan.workers == result.settings.workers and plan.strategy != strategy
        ),
        balanced=result.shares is not None,
    )


def _parts(comparison: ComparisonTable) -> Breakdown:
    """Return the parts of a step as it happened."""
    seconds = {f"{row.quantity}_s": row.right_s for row in comparison.rows}
    return Breakdown(**{field.name: seconds.get(field.name, 0.0) for field in fields(Breakdown)})


def _slowest(timeline: Timeline | None) -> float:
    parts = breakdown_by_device(timeline).values() if timeline is not None else ()
    computing = [part.forward_s + part.backward_s for part in parts]
    total = sum(computing)
    return max(computing) * len(computing) / total if total else 1.0


def _limit(facts: Facts) -> Insight:
    parts, whole = facts.parts, facts.traced_s
    useful = (parts.forward_s + parts.backward_s) / whole
    verdict = "Good" if useful >= _GOOD else "Fair" if useful >= _FAIR else "Poor"
    spent = f"{verdict}: forward and backward passes take {share(useful)} of a step"
    lost = _losses(facts)
    name = max(lost, key=lost.__getitem__)
    most = f"{name}, {share(lost[name] / whole)}"
    if useful >= _GOOD:
        sentence = f"{spent}, so that computation limits; most of the rest is {most}."
    elif lost[name] > parts.forward_s + parts.backward_s:
        sentence = f"{spent}; what limits is {most}."
    else:
        sentence = f"{spent}; what costs most beside them is {most}."
    shown = {"traced step": duration(whole)}
    shown |= {name: duration(seconds) for name, seconds in lost.items() if seconds}
    return Insight("limit", sentence, tuple(shown.items()))


def _losses(facts: Facts) -> dict[str, float]:
    """Return the seconds of a step that are neither forward nor backward, by what they go to."""
    parts = facts.parts
    return {
        "exposed communication": parts.exposed_s,
        "waiting": parts.idle_s,
        "loading": parts.load_s,
        "the weight update": parts.update_s,
    }


def _change(facts: Facts) -> Insight:
    lost = _losses(facts)
    name = max(lost, key=lost.__getitem__)
    saved_s, whole = lost[name], facts.traced_s
    if saved_s < _WORTH * whole:
        sentence = (
            "Change nothing in how the workers work together: without all "
            f"{name} a step would be {facts.times(saved_s):.2f} times as fast. What is left is the "
            "computation itself: lower precision, a compiled model, a faster device."
        )
        return Insight("change", sentence, (("step", duration(whole)), (name, duration(saved_s))))
    gain = (
        f"without {name} a step would take {duration(whole - saved_s)} instead of "
        f"{duration(whole)}, at best {facts.times(saved_s):.2f} times as fast"
    )
    doubled = 2 * whole / (whole + facts.divides_s)
    figures = [(name, share(saved_s / whole) + " of a step")]
    if name in ("exposed communication", "the weight update"):
        figures.append(("twice the batch size", f"at best {doubled:.2f} times the samples/s"))
    return Insight("change", f"{_advice(name, facts)}: {gain}.", tuple(figures))


def _advice(name: str, facts: Facts) -> str:
    if name == "loading":
        return "Prepare the samples beforehand, or make them smaller"
    if name == "the weight update":
        return "Take larger batches, which need fewer updates, or a lighter optimizer"
    if facts.slowest > _UNEVEN and not facts.balanced:
        times = f"{facts.slowest:.2f} times the mean"
        return f"Balance the batches (--balance auto), for the slowest worker computes {times}"
    faster = _faster(facts)
    if faster is not None:
        return f"Try {faster.strategy}, predicted to take {duration(faster.step_s)} a step"
    if name == "waiting":
        return "Look at the two steps below for what the workers wait for"
    return "Exchange less: larger batches, or gradients in fewer bytes (codec)"


def _faster(facts: Facts) -> PlanRow | None:
    """Return the best of the other plans, if it was predicted to be faster than predictions err."""
    best = min(facts.plans, key=lambda plan: plan.step_s, default=None)
    if best is None or best.step_s >= (1 - ERROR_BAR) * facts.predicted_step_s:
        return None
    return best


def _method(facts: Facts) -> Insight:
    error = facts.predicted_step_s / facts.step_s - 1
    than = "no more than" if abs(error) <= ERROR_BAR else "more than"
    sentence = (
        f"{facts.strategy} took {duration(facts.step_s)} a step, {facts.origin}; the prediction was"
        f" off by {share(error, signed=True)}, {than} the {share(ERROR_BAR, 0)} of predictions on "
        "average."
    )
    figures = [(f"{facts.strategy}, predicted", duration(facts.predicted_step_s))]
    best = min(facts.plans, key=lambda plan: plan.step_s, default=None)
    if best is not None:
        times = best.step_s / facts.predicted_step_s
        other = f"{best.strategy} was predicted to take {times:.2f} times as long"
        close = ", too close to tell them apart" if abs(times - 1) <= ERROR_BAR else ""
        sentence += f" Of the others, {other}{close}."
        figures.append((f"{best.strategy}, predicted", duration(best.step_s)))
    return Insight("method", sentence, tuple(figures))


def _workers(facts: Facts) -> Insight:
    workers, divides = facts.workers, facts.divides_s
    others_s = facts.traced_s - divides
    another_s = divides * workers / (workers + 1) + others_s
    gain = facts.traced_s / another_s
    worth = "may pay" if gain > 1 + _WORTH else "does not pay"
    bound = f"at best {gain:.2f} times as fast, if nothing but the computation changed"
    figures = [("step with another worker, at best", duration(another_s))]
    if workers == 1:
        return Insight("workers", f"A second worker {worth}: {bound}.", tuple(figures))
    alone_s = divides * workers + facts.parts.update_s
    times = f"{alone_s / facts.traced_s:.2f} times as fast"
    sentence = (
        f"The {workers} workers are {times} as one of them would be with all samples of a step. "
        f"Another one {worth}: {bound}."
    )
    figures.insert(0, ("step of one worker alone, by its parts", duration(alone_s)))
    return Insight("workers", sentence, tuple(figures))


def _memory(result: Result) -> Iterator[Insight]:
    whole = result.machine.get("memory_bytes")
    peaks = result.peak_memory_bytes
    if not isinstance(whole, int | float) or not whole or not peaks:
        return
    used = sum(peaks) / whole
    room = "Memory is nearly full" if used > _FULL else "Memory leaves room"
    who = "the worker" if len(peaks) == 1 else f"the {len(peaks)} workers, each at its peak,"
    sentence = f"{room}: {who} held {share(used)} of the machine's."
    figures = (("the fullest worker", nbytes(max(peaks))), ("the machine", nbytes(whole)))
    yield Insight("memory", sentence, figures)
