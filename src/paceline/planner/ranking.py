"""Forecasts ranked by throughput, and what they say of workers and codecs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

from paceline.core.durations import duration
from paceline.planner.forecast import Forecast
from paceline.strategies import EXCHANGES

_WORTH = 0.95  # of the step without: predictions are hardly better, and codecs round
_ALL = 0.99  # of a step
_GAIN = 1.02  # what more workers have to gain to be worth using
_NUM_DIGITS = 12  # of throughputs that are told apart
_WHY_NOT = {
    "alone": "one worker alone is faster, and exchanges nothing",
    "no_link": "{strategy} sends nothing over a link",
    "hidden": "the exchange hides behind backward",
    "small": "it saves less than predictions may err",
    "encoding": "encoding takes longer than it saves",
}


def rank(forecasts: Iterable[Forecast]) -> list[Forecast]:
    """Return the forecasts by throughput, best first; then those that change what is learnt.

    These are ranked by the time to a loss, and the ones of which nothing is known by throughput.
    """

    def place(one: Forecast) -> tuple[bool, float, float]:
        learnt, trained = map(_told, (one.learnt_samples_per_s, one.samples_per_s))
        return not one.is_same_training, -learnt, -trained

    return sorted(forecasts, key=place)


def _told(value: float) -> float:
    """Return the digits that tell one plan from another: the last ones are those of rounding."""
    return float(f"{value:.{_NUM_DIGITS}g}")


@dataclass(frozen=True)
class Advice:
    """The advice about codecs: the best forecast without one, and the best with one.

    `beside` is the best without one on as many workers as the one with it.
    """

    plain: Forecast
    encoded: Forecast
    beside: Forecast

    @property
    def pays(self) -> bool:
        """True if a step is faster whatever the predictions err: worth the codec's rounding."""
        return self.encoded.surely_faster_than(self.plain)

    @property
    def may_pay(self) -> bool:
        """True if a step is predicted to be faster, by less than predictions err."""
        return not self.pays and self.encoded.step_s < _WORTH * self.plain.step_s

    @property
    def speedup(self) -> float:
        """The speed-up of a step by the codec."""
        return self.plain.step_s / self.encoded.step_s

    @property
    def sentence(self) -> str:
        """The advice as a sentence, with its reason."""
        plain, encoded = self.plain, self.encoded
        times = f"({duration(encoded.step_s)} for {duration(plain.step_s)})"
        if self.may_pay:
            return (
                f"a codec may pay: {_named(encoded)} is predicted to be {_compared(self.speedup)} "
                f"{times}, by less than predictions may err: measure both"
            )
        if not self.pays:
            would = f"{_named(encoded)} would be {_compared(self.speedup)} {times}"
            why = _WHY_NOT[self.why_not].format(strategy=plain.strategy)
            return f"no codec pays: {why}; {would}"
        faster = f"{_named(encoded)} is {_compared(self.speedup)} than"
        alike = (plain.strategy, plain.workers) == (encoded.strategy, encoded.workers)
        without = "without" if alike else f"{_named(plain)} without"
        return (
            f"a codec pays: {faster} {without} {times}; the link is busy "
            f"{100 * self.beside.link_busy:.0f} % of a plain step; codecs round gradients: "
            "compare the accuracy, too"
        )

    @property
    def why_not(self) -> str:
        """The reason why no codec pays, a key of `_WHY_NOT`."""
        if self.plain.workers == 1:
            return "alone"
        if not self.plain.link_busy:
            return "no_link"
        if self.plain.breakdown.compute_s > _ALL * self.plain.step_s:
            return "hidden"
        return "small" if self.speedup > 1 else "encoding"


def _named(forecast: Forecast) -> str:
    codec = f" with {forecast.codec}" if forecast.codec else ""
    workers = f"{forecast.workers} worker{'s' * (forecast.workers > 1)}"
    return f"{forecast.strategy}{codec} on {workers}"


def _effect(more: Forecast, fewer: Forecast) -> str:
    """Return what more workers would do to the samples/s of fewer; "may" if ranges overlap."""
    times = more.samples_per_s / fewer.samples_per_s
    change = f"{100 * abs(times - 1):.0f} %"
    if change == "0 %":
        return "are predicted to be as fast"
    is_sure = more.surely_faster_than(fewer) or fewer.surely_faster_than(more)
    return f"{'would' if is_sure else 'may'} {'gain' if times > 1 else 'lose'} {change}"


def _compared(speedup: float) -> str:
    factor = f"{max(speedup, 1 / speedup):.2f}"
    if factor == "1.00":
        return "as fast"
    return f"{factor}x {'faster' if speedup > 1 else 'slower'}"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A strategy that cannot be used on so many workers, and why."""

    strategy: str
    workers: int
    placement: str
    why: str


@dataclass(frozen=True)
class Ranking(Sequence[Forecast]):
    """Forecasts, best first, and what was refused.

    `alone` is the best forecast of one worker, where only another number was asked for.
    """

    forecasts: tuple[Forecast, ...]
    refused: tuple[Refusal, ...]
    batch_size: int
    alone: Forecast | None = None

    def __len__(self) -> int:
        return len(self.forecasts)

    @overload
    def __getitem__(self, index: int) -> Forecast: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Forecast]: ...
    def __getitem__(self, index: int | slice) -> Forecast | Sequence[Forecast]:
        return self.forecasts[index]

    @cached_property
    def advice(self) -> Advice | None:
        """The advice about codecs of gradients, where whole replicas exchange them, or None."""
        replicas = [one for one in self.forecasts if one.strategy in EXCHANGES]
        plain = [one for one in replicas if one.codec is None]
        encoded = next((one for one in replicas if one.codec is not None), None)
        if encoded is None:
            return None
        beside = next(one for one in plain if one.workers == encoded.workers)
        return Advice(plain[0], encoded, beside)

    @cached_property
    def best_of(self) -> dict[int, Forecast]:
        """The best forecast for each number of workers, by that number."""
        best: dict[int, Forecast] = {}
        for forecast in self.forecasts:
            best.setdefault(forecast.workers, forecast)
        return dict(sorted(best.items()))

    @property
    def worth(self) -> int | None:
        """The fewest workers beyond which more hardly gain, or lose.

        None if nothing could be planned, or if only one number was looked at of those that may be.
        """
        if not self._is_comparison:
            return None
        most = self.forecasts[0].samples_per_s
        return next(
            workers
            for workers, forecast in self.best_of.items()
            if forecast.samples_per_s * _GAIN >= most
        )

    @property
    def _is_comparison(self) -> bool:
        """True if numbers of workers were compared, or one worker is all that there is."""
        return len(self.best_of) > 1 or set(self.best_of) == {1}

    @property
    def workers_sentence(self) -> str | None:
        """A sentence about the number of workers worth using, and the effect of more.

        Of a single number that was asked for it says how fast they are beside one worker, and None
        if that is not known: others may be faster than both.
        """
        worth, best = self.worth, self.best_of
        if worth is None:
            return self._beside_one()
        one = best.get(1)
        gain = "" if worth == 1 else self._gain(best[worth], one)
        plural = "worker is" if worth == 1 else "workers are"
        if one is not None and worth > 1 and not best[worth].surely_faster_than(one):
            plural = "workers may be"
        sentence = f"{worth} {plural} worth using{gain}"
        more = [workers for workers in best if workers > worth]
        if not more:
            return sentence
        return f"{sentence}; {more[-1]} {_effect(best[more[-1]], best[worth])}"

    def _gain(self, best: Forecast, one: Forecast | None) -> str:
        """Return what workers gain over one, and that what is learnt changes, if it does."""
        gain = "" if one is None else f", {best.samples_per_s / one.samples_per_s:.2f}x one worker"
        if best.is_same_training:
            return gain
        return gain + f" with {best.strategy}, which is not the same training"

    def _beside_one(self) -> str | None:
        if self.alone is None or not self.forecasts:
            return None
        best = self.forecasts[0]
        times = best.samples_per_s / self.alone.samples_per_s
        beside = f"are{self._gain(best, self.alone).removeprefix(',')}"
        if times < _GAIN:
            verdict = "slower" if times * _GAIN < 1 else "no faster"
            beside = f"are {verdict} than one ({times:.2f}x)"
        return f"{best.workers} workers {beside}; other numbers of workers were not compared"
