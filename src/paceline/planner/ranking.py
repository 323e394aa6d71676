"""Rank forecasts, and compare numbers of workers and codecs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

from paceline.planner.forecast import Forecast
from paceline.strategies import EXCHANGES

_GAIN = 1.02  # minimum speed-up by workers that are worth using
_NUM_DIGITS = 12  # of throughputs; further ones differ by rounding


def rank(forecasts: Iterable[Forecast]) -> list[Forecast]:
    """Sort forecasts by throughput, best first, then those that change training.

    The latter are sorted by time to a loss, or by throughput if that is unknown.
    """

    def place(one: Forecast) -> tuple[bool, float, float]:
        rates = one.learnt_samples_per_s, one.samples_per_s
        learnt, trained = (float(f"{rate:.{_NUM_DIGITS}g}") for rate in rates)
        return not one.is_same_training, -learnt, -trained

    return sorted(forecasts, key=place)


@dataclass(frozen=True)
class Advice:
    """The best forecasts without and with a codec.

    `same_workers`: the best one without a codec on as many workers as `encoded`.
    """

    plain: Forecast
    encoded: Forecast
    same_workers: Forecast

    @property
    def pays(self) -> bool:
        """Whether the codec is faster even at the worst ends of both ranges."""
        return self.encoded.surely_faster_than(self.plain)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A strategy that cannot be used on a number of workers, and the reason."""

    strategy: str
    workers: int
    placement: str
    why: str


@dataclass(frozen=True)
class Ranking(Sequence[Forecast]):
    """Forecasts, best first, and refused strategies.

    `alone`: the best forecast of one worker, if only another number was asked for.
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
        """Codecs compared, for strategies that exchange all gradients; None without a codec."""
        replicas = [one for one in self.forecasts if one.strategy in EXCHANGES]
        plain = [one for one in replicas if one.codec is None]
        encoded = next((one for one in replicas if one.codec is not None), None)
        if encoded is None:
            return None
        alike = next(one for one in plain if one.workers == encoded.workers)
        return Advice(plain[0], encoded, alike)

    @cached_property
    def best_of(self) -> dict[int, Forecast]:
        """The best forecast by number of workers."""
        best: dict[int, Forecast] = {}
        for forecast in self.forecasts:
            best.setdefault(forecast.workers, forecast)
        return dict(sorted(best.items()))

    @property
    def worth(self) -> int | None:
        """The number of workers beyond which more gain less than 2 %.

        None if numbers of workers were not compared, although there is more than one worker.
        """
        if len(self.best_of) < 2 and set(self.best_of) != {1}:
            return None
        most = self.forecasts[0].samples_per_s
        return next(
            workers
            for workers, forecast in self.best_of.items()
            if forecast.samples_per_s * _GAIN >= most
        )
