"""Forecasts, best first: how many workers are worth using, and what was refused."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

from paceline.planner.advice import Advice, advise
from paceline.planner.forecast import Forecast
from paceline.strategies import EXCHANGES

# Mean absolute error of a predicted step: benchmarks/planner.
ERROR_BAR = 0.06
_GAIN = 1.02  # what more workers have to gain to be worth using


@dataclass(frozen=True, slots=True)
class Refusal:
    """A strategy that cannot be used on so many workers, and why."""

    strategy: str
    workers: int
    placement: str
    why: str


@dataclass(frozen=True)
class Ranking(Sequence[Forecast]):
    """Forecasts, best first, and what was refused."""

    forecasts: tuple[Forecast, ...]
    refused: tuple[Refusal, ...]
    batch_size: int

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
        """Whether a codec of gradients pays, where whole replicas exchange them."""
        return advise([one for one in self.forecasts if one.strategy in EXCHANGES])

    @cached_property
    def best_of(self) -> dict[int, Forecast]:
        """The best forecast for each number of workers, by that number."""
        best: dict[int, Forecast] = {}
        for forecast in self.forecasts:
            best.setdefault(forecast.workers, forecast)
        return dict(sorted(best.items()))

    @property
    def worth(self) -> int:
        """The fewest workers beyond which more hardly gain, or lose."""
        most = self.forecasts[0].samples_per_s
        return next(
            workers
            for workers, forecast in self.best_of.items()
            if forecast.samples_per_s * _GAIN >= most
        )

    @property
    def workers_sentence(self) -> str:
        """Say how many workers are worth using, and what more would do."""
        worth, best = self.worth, self.best_of
        one = best.get(1)
        gain = ""
        if one is not None and worth > 1:
            gain = f", {best[worth].samples_per_s / one.samples_per_s:.2f}x one worker"
        plural = "worker is" if worth == 1 else "workers are"
        sentence = f"{worth} {plural} worth using{gain}"
        more = [workers for workers in best if workers > worth]
        if not more:
            return sentence
        last = best[more[-1]].samples_per_s / best[worth].samples_per_s
        change = f"gain {100 * (last - 1):.0f} %" if last >= 1 else f"lose {100 * (1 - last):.0f} %"
        return f"{sentence}; {more[-1]} would {change}"
