"""How long things take: repeated for a while, on all ranks together."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, quantiles
from typing import Self

from pydantic import BaseModel, ConfigDict

from paceline.links.group import Group
from paceline.probe.text import rounded
from paceline.record.clock import Clock

_FEWEST_RUNS, _MOST_RUNS = 3, 400

Run = Callable[[], object]


class Spread(BaseModel):
    """The median of what was measured, and its quartiles."""

    model_config = ConfigDict(frozen=True)

    median: float
    lower: float
    upper: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Return that of two or more values."""
        lower, _, upper = quantiles(values, n=4, method="inclusive")
        return cls(median=median(values), lower=lower, upper=upper, count=len(values))

    @classmethod
    def rate(cls, amount: float, seconds: Sequence[float]) -> Self:
        """Return that of `amount` a second, given the seconds of each run."""
        return cls.of([amount / one for one in seconds])

    def text(self, unit: str) -> str:
        """Return the median, and between what half of the runs were."""
        middle, lower, upper = (rounded(v, unit) for v in (self.median, self.lower, self.upper))
        return f"{middle} ({lower} to {upper}, quartiles of {self.count})"


@dataclass(frozen=True)
class Sampler:
    """Repeats what is to be measured for about `seconds_each`, by one clock.

    All ranks call it together, and repeat what they do equally often: each measures what it gets
    beside the others, and collectives fit.
    """

    group: Group
    clock: Clock
    seconds_each: float

    def seconds(self, run: Run) -> list[float]:
        """Return the seconds of each repetition, three or more."""
        return self.in_turns([run])[0]

    def in_turns(self, runs: Sequence[Run]) -> list[list[float]]:
        """Return for each run the seconds of its repetitions; what disturbs one disturbs all."""
        for run in runs:
            run()  # to warm up
        first = self._timed(runs, 1)
        slowest = max(1e-9, *self.group.gather(sum(map(sum, first))))
        num_rounds = min(_MOST_RUNS, max(_FEWEST_RUNS, self.seconds_each * len(runs) / slowest))
        more = self._timed(runs, int(num_rounds) - 1)
        return [one + others for one, others in zip(first, more, strict=True)]

    def of_last(self, runs: Sequence[Run], ranks: Collection[int]) -> list[list[float]]:
        """Return the seconds of collectives of these ranks, in turns; other ranks do nothing.

        They are those of the rank that came last to it: what others wait for it is nothing that
        the collective takes.
        """
        own = self.in_turns(runs if self.group.rank in ranks else [idle] * len(runs))
        rows = self.group.gather(own)
        return [
            [min(row) for row in zip(*(rows[rank][i] for rank in ranks), strict=True)]
            for i in range(len(runs))
        ]

    def _timed(self, runs: Sequence[Run], num_rounds: int) -> list[list[float]]:
        marks = [self.clock.mark()]
        for _ in range(num_rounds):
            for run in runs:
                run()
                marks.append(self.clock.mark())
        seconds = [end - begin for begin, end in pairwise(self.clock.seconds(marks))]
        return [seconds[i :: len(runs)] for i in range(len(runs))]


def idle() -> None:
    """Do nothing, while another rank is measured."""
