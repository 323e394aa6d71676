"""Forecasts ranked by throughput, and what they say of workers and codecs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

from paceline.planner.forecast import Forecast
from paceline.strategies import EXCHANGES

_GAIN = 1.02  # what more workers have to gain to be worth using
_NUM_DIGITS = 12  # of throughputs that are told apart


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


@dataclass(frozen=True, slots=True)
class Refusal:
    """A strategy that cannot be used on so many workers, and why."""

    strategy: str
    workers: int
    placement: str
    why: str


@dataclass(frozen=True)
class Ranking(Sequence[Forecast]):
    """Forecasts, best first, and refused configurations.

    `alone`: the best forecast of one worker, if only other numbers of workers were planned.
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
