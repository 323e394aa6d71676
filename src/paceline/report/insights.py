"""Insights about a run or a rehearsal: whether it is good, and what to change.

All is computed from the saved result. "Would" is arithmetic with the parts of a typical step: what
computes a worker's samples divides among workers, all else stays as it is.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import itemgetter

from paceline.core.compare import Breakdown, breakdown_by_device
from paceline.core.defaults import completed
from paceline.core.outcome import Insight
from paceline.core.settings import RehearseSettings, TrainSettings
from paceline.core.timeline import Origin, Timeline
from paceline.planner import ERROR_BAR
from paceline.planner.backward import after_backward_sentence, compared
from paceline.records.result import PlanRow, RunResult
from paceline.report.epoch_insights import of_epochs
from paceline.report.format import (
    change_text,
    duration,
    nbytes,
    number,
    ratio,
    share,
)

_GOOD, _FAIR = 0.9, 0.7  # shares of what could be reached
WORTH = 0.03  # of a step: less is not worth a change
_UNEVEN = 1.15  # times the mean
_FULL = 0.8  # of the memory
_BUSY = 0.8  # of the time
_MOST_FIGURES = 8
_CODES = {  # of the losses of a step
    "exposed communication": "exchange",
    "waiting": "waiting",
    "loading": "loading",
    "the weight update": "update",
}


def verdict(reached: float) -> str:
    """Return Good, Fair or Poor for a share of what could be reached."""
    return "Good" if reached >= _GOOD else "Fair" if reached >= _FAIR else "Poor"


def _off_by(error: float) -> tuple[str, str]:
    """Return how far off a prediction was, and the code of that."""
    is_usual = abs(error) <= ERROR_BAR
    usual = f"{share(ERROR_BAR, 0)} of predictions on average"
    said = f"off by {change_text(error)}, {'no more' if is_usual else 'more'} than the {usual}."
    return said, f"prediction.{'usual' if is_usual else 'far_off'}"


@dataclass(frozen=True)
class _InStep:
    """A run of workers in step, as its insights need it.

    `parts` are those of a typical traced step, on average over the devices; `slowest` is by how
    many times the slowest device computes longer than they do on average. `best_other` is the
    fastest of the others that were predicted for as many workers, with a codec or without.
    """

    result: RunResult
    step_s: float
    predicted_step_s: float
    parts: Breakdown
    slowest: float
    best_other: PlanRow | None

    @property
    def range_s(self) -> tuple[float, float]:
        """The range of the predicted step; the step itself where no range is known."""
        return self.result.predicted_range_s or (self.predicted_step_s, self.predicted_step_s)

    @property
    def divides_s(self) -> float:
        """Seconds of a step that another worker would take a part of."""
        return self.parts.load_s + self.parts.passes_s

    @property
    def losses(self) -> dict[str, float]:
        """Seconds of a step that are neither forward nor backward, by what they go to."""
        return {
            "exposed communication": self.parts.exposed_s,
            "waiting": self.parts.idle_s,
            "loading": self.parts.load_s,
            "the weight update": self.parts.update_s,
        }

    @property
    def largest_loss(self) -> tuple[str, float]:
        return max(self.losses.items(), key=itemgetter(1))


def of_run(result: RunResult, timelines: Mapping[Origin, Timeline]) -> Iterator[Insight]:
    """Yield the insights about workers in step, the most important first."""
    assert result.comparison is not None  # or the workers have no steps in common
    assert result.step_s is not None
    seconds = {f"{row.quantity}_s": row.right_s for row in result.comparison.rows}
    timeline = timelines.get(result.origin)
    by_device = breakdown_by_device(timeline).values() if timeline is not None else ()
    computing = [part.passes_s for part in by_device]
    total, workers = sum(computing), int(result.settings.workers)
    plans = () if result.is_rehearsal else result.plans
    others = [one for one in plans if one.strategy != result.strategy and one.workers == workers]
    run = _InStep(
        result,
        result.step_s,
        result.predicted_step_s or result.step_s,
        Breakdown(**{field.name: seconds.get(field.name, 0.0) for field in fields(Breakdown)}),
        slowest=max(computing) * len(computing) / total if total else 1.0,
        best_other=min(others, key=lambda plan: plan.step_s, default=None),
    )
    if run.parts.step_s > 0:
        yield _prediction_of_step(run)
        yield _limit(run)
        yield _change(run)
        if result.shares is None:
            yield _workers(run, workers)
    if not result.is_rehearsal:
        yield from of_epochs(result.epochs, result.score)
        yield from _memory(result)
    if run.parts.step_s > 0:
        yield from of_exchanges(result.plans)


def of_exchanges(plans: Sequence[PlanRow]) -> Iterator[Insight]:
    """Yield what each exchange was predicted to leave after backward, where plans say so."""
    sentence = after_backward_sentence(plans)
    if sentence is not None:
        left = [(name, plan.after_backward) for name, plan in compared(plans).items()]
        figures = [(f"left with {name}", duration(one.left_s)) for name, one in left if one]
        yield Insight("exchange", f"Predicted: {sentence}.", tuple(figures), "exchange.left")


def brought(result: RunResult) -> str | None:
    """Return in a sentence what working together brought, by the parts of a traced step.

    None where workers have no steps in common, have unequal parts of a batch, or are one.
    """
    if result.comparison is None or result.shares is not None or result.num_workers == 1:
        return None
    seconds = {row.quantity: row.right_s for row in result.comparison.rows}
    together_s = seconds.get("step", 0.0)
    if not together_s:
        return None
    divides = ("load", "forward", "backward", "train")
    divides_s = sum(seconds.get(name, 0.0) for name in divides)
    alone_s = result.num_workers * divides_s + seconds.get("update", 0.0)
    times = f"{alone_s / together_s:.2f} times as fast as one of them with all samples of a step"
    if result.num_workers == 2:
        return f"with the second worker training is {times}, by the parts of a step"
    return f"the {result.num_workers} workers are {times}, by the parts of a step"


def _limit(run: _InStep) -> Insight:
    parts, whole = run.parts, run.parts.step_s
    useful = parts.passes_s / whole
    spent = f"{verdict(useful)}: forward and backward passes take {share(useful)} of a step"
    name, lost_s = run.largest_loss
    most = f"{name}, {share(lost_s / whole)}"
    if useful >= _GOOD:
        rest, code = f", so that computation limits; most of the rest is {most}.", "computation"
    elif lost_s > parts.passes_s:
        rest, code = f"; what limits is {most}.", _CODES[name]
    else:
        rest, code = f"; what costs most beside them is {most}.", f"partly.{_CODES[name]}"
    shown = {"traced step": whole} | {name: value for name, value in run.losses.items() if value}
    figures = tuple((name, duration(s)) for name, s in shown.items())
    return Insight("limit", spent + rest, figures, f"limit.{code}")


def _change(run: _InStep) -> Insight:
    name, saved_s = run.largest_loss
    whole = run.parts.step_s
    left_s = whole - saved_s
    times = whole / left_s if left_s > 0 else float("inf")
    if saved_s < WORTH * whole:
        sentence = (
            f"Change nothing in how the workers work together: without all {name} a step would be "
            f"{times:.2f} times as fast. What is left is the computation itself: lower precision, "
            "a compiled model, a faster device."
        )
        shown = ("step", duration(whole)), (name, duration(saved_s))
        return Insight("change", sentence, shown, "change.nothing")
    code, advice = _advice(name, run)
    sentence = (
        f"{advice}: without {name} a step would take {duration(left_s)} instead of "
        f"{duration(whole)}, at best {times:.2f} times as fast."
    )
    figures = [(name, share(saved_s / whole) + " of a step")]
    if name in ("exposed communication", "the weight update"):
        doubled = ratio(2 * whole, whole + run.divides_s)
        figures.append(("twice the batch size", f"at best {doubled:.2f} times the samples/s"))
    return Insight("change", sentence, tuple(figures), f"change.{code}")


def _advice(name: str, run: _InStep) -> tuple[str, str]:
    """Return the code and the sentence of what would make a step shorter."""
    if name == "loading":
        return "faster_loading", "Prepare the samples beforehand, or make them smaller"
    if name == "the weight update":
        fewer = "Take larger batches, which need fewer updates"
        if _is_plain_sgd(run.result.settings):
            return "fewer_updates", fewer
        return "lighter_updates", f"{fewer}, or a lighter optimizer"
    if run.slowest > _UNEVEN and run.result.shares is None:
        times = f"{run.slowest:.2f} times the mean"
        slow = f"for the slowest worker computes {times}"
        return "balance", f"Balance the batches (--balance auto), {slow}"
    other = run.best_other
    # Only where their ranges do not overlap is the other sure to be faster.
    if other is not None and other.range_s[1] < run.range_s[0]:
        step = f"{duration(other.step_s)} a step"
        return "other_strategy", f"Try {other.strategy}, predicted to take {step}"
    if name == "waiting":
        return "find_waits", "Look at the two steps below for what the workers wait for"
    return "exchange_less", "Exchange less: larger batches, or gradients in fewer bytes (codec)"


def _is_plain_sgd(settings: TrainSettings | RehearseSettings) -> bool:
    """Return True if no optimizer does less for an update."""
    if isinstance(settings, RehearseSettings):
        return False
    asked = completed(settings)
    return asked.optimizer is not None and asked.optimizer.lower() == "sgd" and not asked.momentum


def _prediction_of_step(run: _InStep) -> Insight:
    strategy, predicted_s = run.result.strategy, run.predicted_step_s
    off, code = _off_by(predicted_s / run.step_s - 1)
    took = f"{strategy} took {duration(run.step_s)} a step, {run.result.origin}"
    sentence = f"{took}; the prediction was {off}"
    figures = [(f"{strategy}, predicted", duration(predicted_s))]
    other = run.best_other
    if other is not None:
        times = ratio(other.step_s, predicted_s)
        overlap = other.range_s[0] <= run.range_s[1] and run.range_s[0] <= other.range_s[1]
        close = ", too close to tell them apart" if overlap else ""
        long = f"{times:.2f} times as long{close}"
        sentence += f" Of the others, {other.strategy} was predicted to take {long}."
        figures.append((f"{other.strategy}, predicted", duration(other.step_s)))
        code += ".others_close" if overlap else ".others_apart"
    return Insight("prediction", sentence, tuple(figures), code)


def _workers(run: _InStep, workers: int) -> Insight:
    divides_s, whole = run.divides_s, run.parts.step_s
    another_s = divides_s * workers / (workers + 1) + whole - divides_s
    gain = ratio(whole, another_s)
    pays = gain > 1 + WORTH
    worth, code = ("may pay", "workers.more") if pays else ("does not pay", "workers.enough")
    bound = f"at best {gain:.2f} times as fast, if nothing but the computation changed"
    another = ("step with another worker, at best", duration(another_s))
    if workers == 1:
        return Insight("workers", f"A second worker {worth}: {bound}.", (another,), code)
    alone_s = divides_s * workers + run.parts.update_s
    sentence = (
        f"The {workers} workers are {alone_s / whole:.2f} times as fast as one of them would be "
        f"with all samples of a step. Another one {worth}: {bound}."
    )
    alone = ("step of one worker alone, by its parts", duration(alone_s))
    return Insight("workers", sentence, (alone, another), code)


def _memory(result: RunResult) -> Iterator[Insight]:
    whole, peaks = result.machine.get("memory_bytes"), result.peak_memory_bytes
    if not isinstance(whole, int | float) or not whole or not peaks:
        return
    used = sum(peaks) / whole
    is_full = used > _FULL
    room = "Memory is nearly full" if is_full else "Memory leaves room"
    who = "the worker" if len(peaks) == 1 else f"the {len(peaks)} workers, each at its peak,"
    sentence = f"{room}: {who} held {share(used)} of the machine's."
    figures = (("the fullest worker", nbytes(max(peaks))), ("the machine", nbytes(whole)))
    yield Insight("memory", sentence, figures, f"memory.{'nearly_full' if is_full else 'room'}")


def of_asynchronous(result: RunResult) -> Iterator[Insight]:
    """Yield the insights about workers that have no steps in common, the most important first."""
    tried = [row.tried_samples_per_s for row in result.workers]
    alone = sum(speed for speed in tried if speed is not None)
    if alone and None not in tried:
        reached, code = result.samples_per_s / alone, "limit.together"
        sentence = (
            f"{verdict(reached)}: together the workers reach {share(reached)} of the samples/s "
            "that they reached one by one before the training."
        )
        if reached > 1 + ERROR_BAR:
            sentence = (
                f"Together the workers are {reached:.2f} times as fast as one by one before the "
                "training, which working together cannot make them: the machine was busier then."
            )
            code = "limit.busier_before"
        together = f"{number(result.samples_per_s)} samples/s"
        shown = ("together", together), ("one by one", number(alone))
        yield Insight("limit", sentence, shown, code)
    if result.utilisation:
        yield _idlest(result)
    if travelling := [row for row in result.traffic if row.travels and row.nbytes]:
        most = max(travelling, key=lambda row: row.nbytes)
        part = share(ratio(most.nbytes, sum(row.nbytes for row in travelling)))
        sentence, code = f"Of what travels, {most.purpose} are {part} of the bytes", "traffic.most"
        # None stands for a codec that nobody has named; what has no such field takes none.
        if most.purpose in result.config and result.config[most.purpose] is None:
            sentence += "; a codec for them (--codec) would save most"
            code = "traffic.codec"
        yield Insight("method", f"{sentence}.", ((most.purpose, nbytes(most.nbytes)),), code)
    yield from _prediction(result)
    yield from of_epochs(result.epochs, result.score)
    if result.updates is not None and result.updates.staleness:
        mean = result.updates.mean_staleness
        sentence = f"A batch missed {mean:.1f} updates of other workers on average."
        figures = []
        for name, times in list(result.updates.staleness.items())[:_MOST_FIGURES]:
            missed = sum(missed * count for missed, count in times.items())
            figures.append((f"{name} missed", f"{missed / (sum(times.values()) or 1):.1f}"))
        yield Insight("method", sentence, tuple(figures), "updates.staleness")


def _idlest(result: RunResult) -> Insight:
    """Return how busy the idlest device was, and what would give it more to do."""
    name, busy = min(result.utilisation.items(), key=itemgetter(1))
    figures = tuple((device, share(value)) for device, value in result.utilisation.items())
    shown = figures[:_MOST_FIGURES]
    if busy >= _BUSY:
        sentence = f"All devices are busy: the idlest, {name}, computed for {share(busy)} of the"
        return Insight("workers", f"{sentence} time.", shown, "workers.busy")
    advice, code = f"Give {name} larger batches, or leave it out", "change.larger_batches"
    if options := _one_more_each(result):
        advice, code = f"Let more workers alternate on a device ({options})", "change.more_lanes"
    sentence = f"{advice}: {name} computed for only {share(busy)} of the time."
    return Insight("change", sentence, shown, code)


def _one_more_each(result: RunResult) -> str | None:
    """Return the options by which one more worker takes turns on each device, or None.

    More lanes alone would put the same workers on fewer devices.
    """
    lanes, staleness = result.config.get("lanes"), result.config.get("staleness")
    if not isinstance(lanes, int) or staleness == 0:  # workers in step cannot fetch a step ahead
        return None
    workers = (lanes + 1) * len(result.utilisation)
    if workers > result.settings.batch_size:
        return None
    return f"--workers {workers} --set lanes={lanes + 1}"


def _prediction(result: RunResult) -> Iterator[Insight]:
    """Yield the error of the predicted samples/s or, if only that is known, of the step."""
    if result.predicted_samples_per_s is not None and result.samples_per_s:
        what, error = "samples/s", result.predicted_samples_per_s / result.samples_per_s - 1
        predicted = number(result.predicted_samples_per_s)
    elif result.predicted_step_s is not None and result.prediction_error is not None:
        what, error = "a step", result.prediction_error
        predicted = duration(result.predicted_step_s)
    else:
        return
    off, code = _off_by(error)
    sentence = f"The prediction of {what} was {off}"
    yield Insight("prediction", sentence, (("predicted", predicted),), code)
