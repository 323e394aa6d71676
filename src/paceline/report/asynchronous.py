"""What runs of asynchronous workers say: those of hogbatch, and those of wheel."""

from collections.abc import Iterator, Mapping

from paceline.core.insight import Insight
from paceline.planner import ERROR_BAR
from paceline.report.format import duration, nbytes, number, share
from paceline.report.learned import of_epochs
from paceline.uneven_result import UnevenResult
from paceline.wheel_result import WheelRehearsal, WheelResult

_GOOD, _FAIR = 0.9, 0.7
_BUSY = 0.8  # of the time of training
_IDLE = 0.15  # of the traced steps
_MOST_FIGURES = 8


def of_uneven(result: UnevenResult) -> Iterator[Insight]:
    """Yield what is to be said of workers that share a model, the most important first."""
    yield from _together(result)
    yield from _idlest(result)
    if result.predicted_samples_per_s:
        happened, predicted = result.samples_per_s, result.predicted_samples_per_s
        yield _prediction("samples/s", predicted / happened - 1, number(predicted))
    yield from of_epochs(result.epochs, result.score)
    yield from _missed(result)


def _together(result: UnevenResult) -> Iterator[Insight]:
    """Yield what the workers reach together of what each reached alone, if each was tried."""
    tried = [row.tried_samples_per_s for row in result.workers]
    alone = sum(speed for speed in tried if speed is not None)
    if not alone or None in tried:
        return
    reached = result.samples_per_s / alone
    verdict = "Good" if reached >= _GOOD else "Fair" if reached >= _FAIR else "Poor"
    sentence = (
        f"{verdict}: together the workers reach {share(reached)} of the samples/s that they reached"
        " one by one before the training."
    )
    together = f"{number(result.samples_per_s)} samples/s"
    yield Insight("limit", sentence, (("together", together), ("one by one", number(alone))))


def _idlest(result: UnevenResult) -> Iterator[Insight]:
    if not result.utilisation:
        return
    name = min(result.utilisation, key=result.utilisation.__getitem__)
    busy = result.utilisation[name]
    figures = tuple((worker, share(value)) for worker, value in result.utilisation.items())
    for_so_long = f"{share(busy)} of the training"
    if busy < _BUSY:
        sentence = f"Give {name} larger batches, or leave it out: it computed for only"
        yield Insight("change", f"{sentence} {for_so_long}.", figures[:_MOST_FIGURES])
    else:
        sentence = f"All workers are busy: the least, {name}, computed for {for_so_long}."
        yield Insight("workers", sentence, figures[:_MOST_FIGURES])


def _missed(result: UnevenResult) -> Iterator[Insight]:
    times: dict[int, int] = {}
    for counted in result.staleness.values():
        for missed, number_of in counted.items():
            times[missed] = times.get(missed, 0) + number_of
    if not times:
        return
    sentence = f"A batch missed {_mean(times):.1f} updates of other workers on average."
    shown = list(result.staleness.items())[:_MOST_FIGURES]
    figures = tuple((f"{name} missed", f"{_mean(counted):.1f}") for name, counted in shown)
    yield Insight("method", sentence, figures)


def _mean(times: Mapping[int, int]) -> float:
    total = sum(times.values())
    return sum(missed * number_of for missed, number_of in times.items()) / total if total else 0.0


def _prediction(of_what: str, error: float, predicted: str) -> Insight:
    than = "no more than" if abs(error) <= ERROR_BAR else "more than"
    sentence = (
        f"The prediction of {of_what} was off by {share(error, signed=True)}, {than} the "
        f"{share(ERROR_BAR, 0)} of predictions on average."
    )
    return Insight("method", sentence, (("predicted", predicted),))


def of_wheel(result: WheelResult | WheelRehearsal) -> Iterator[Insight]:
    """Yield what is to be said of bodies and a hub, the most important first."""
    if result.idle_shares:
        yield from _idle_devices(result)
    yield from _traffic(result)
    error, predicted_s = result.prediction_error, result.predicted_step_s
    if error is not None and predicted_s is not None:
        yield _prediction("a step", error, duration(predicted_s))
    if isinstance(result, WheelResult):
        yield from of_epochs(result.epochs, "accuracy")
    sentence = f"Gradients missed {result.mean_staleness:.1f} updates of others on average."
    yield Insight("method", sentence, (("updates", f"{result.updates:,}"),))


def _idle_devices(result: WheelResult | WheelRehearsal) -> Iterator[Insight]:
    name = max(result.idle_shares, key=result.idle_shares.__getitem__)
    idle = result.idle_shares[name]
    figures = [(f"{device} idle", share(value)) for device, value in result.idle_shares.items()]
    shown = tuple(figures[:_MOST_FIGURES])
    if idle <= _IDLE:
        sentence = f"Good: the devices compute; the idlest, {name}, waited for {share(idle)}"
        yield Insight("limit", f"{sentence} of the traced steps.", shown)
        return
    sentence = f"What limits is the hub or the way to it: {name} waited for {share(idle)}"
    yield Insight("limit", f"{sentence} of the traced steps.", shown)
    lanes = result.settings.config().lanes
    more = (
        f"Let more workers alternate on a device (--set lanes={lanes + 1}): with {lanes} of them "
        f"{name} still waits."
    )
    best = f"at best {1 / (1 - idle):.2f} times as fast" if idle < 1 else "not known"
    yield Insight("change", more, (("without the waiting", best),))


def _traffic(result: WheelResult | WheelRehearsal) -> Iterator[Insight]:
    travelling = [row for row in result.purposes if row.travels and row.nbytes]
    total = sum(row.nbytes for row in travelling)
    if not total:
        return
    most = max(travelling, key=lambda row: row.nbytes)
    sentence = f"Of what travels, {most.purpose} are {share(most.nbytes / total)} of the bytes"
    if most.nbytes >= most.formula_nbytes:  # as they are, not encoded
        sentence += "; a codec for them (--codec) would save most"
    figures = (
        (most.purpose, nbytes(most.nbytes)),
        ("all, of an update", nbytes(total / max(1, result.updates))),
    )
    yield Insight("method", f"{sentence}.", figures)
