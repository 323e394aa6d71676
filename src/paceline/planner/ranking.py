"""Rank forecasts, and compare numbers of workers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

from paceline.planner.forecast import Forecast

_GAIN = 1.02  # minimum speed-up that justifies further workers
_NUM_DIGITS = 12  # compared digits of throughputs; rounding errors change further digits


def rank(forecasts: Iterable[Forecast]) -> list[Forecast]:
    """Sort forecasts, best first; forecasts that change training come last.

    Forecasts of the same training are sorted by throughput. Forecasts that change training are
    sorted by the time to a given loss, or by throughput if this time is unknown.
    """

    def place(one: Forecast) -> tuple[bool, float, float]:
        rates = one.learnt_samples_per_s, one.samples_per_s
        learnt, trained = (float(f"{rate:.{_NUM_DIGITS}g}") for rate in rates)
        return not one.is_same_training, -learnt, -trained

    return sorted(forecasts, key=place)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A strategy that cannot be used on a number of workers, and the reason."""

    strategy: str
    workers: int
    placement: str
    why: str


@dataclass(frozen=True)
class Ranking(Sequence[Forecast]):
    """Forecasts, best first, and the refused strategies.

    `alone`: the best forecast of one worker, if the user asked only for another number of workers.
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
    def best_of(self) -> dict[int, Forecast]:
        """The best forecast for each number of workers."""
        best: dict[int, Forecast] = {}
        for forecast in self.forecasts:
            best.setdefault(forecast.workers, forecast)
        return dict(sorted(best.items()))

    @property
    def worth(self) -> int | None:
        """The smallest number of workers with a throughput within 2 % of the best.

        None if only one number of workers was planned, unless this number is 1.
        """
        if len(self.best_of) < 2 and set(self.best_of) != {1}:
            return None
        most = self.forecasts[0].samples_per_s
        return next(
            workers
            for workers, forecast in self.best_of.items()
            if forecast.samples_per_s * _GAIN >= most
        )
