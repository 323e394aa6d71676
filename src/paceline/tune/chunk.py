"""How many layers to exchange together: found while training goes on, from the steps' times.

A chunk of as many layers as there are, or more, is the same as chunks of one (`core.chunks`): sizes
below the number of layers are all that can be tried.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from math import fsum, inf
from statistics import median
from typing import NamedTuple, Protocol

_STRIDE = 3  # from one far candidate to the next


class Trial(NamedTuple):
    """A chunk size that was in use for an interval: seconds per step, predicted and measured.

    `predicted_s` is None where nothing was predicted.
    """

    chunk: int
    predicted_s: float | None
    measured_s: float


class ChunkTuner(Protocol):
    """Looks for a chunk size; after each `interval` steps it may choose another one."""

    interval: int

    @property
    def chunk(self) -> int:
        """The chunk size to use now."""
        ...

    @property
    def done(self) -> bool:
        """Whether `chunk` is the result."""
        ...

    @property
    def trials(self) -> tuple[Trial, ...]:
        """What has been measured so far, in that order."""
        ...

    def record(self, seconds: float) -> None:
        """Note how long a step took with `chunk`."""
        ...


class _Search(ABC):
    """Hands whole intervals of steps to `_judge`, until it is done."""

    def __init__(self, first: int, interval: int) -> None:
        if interval < 1:
            raise ValueError(f"interval: a search looks at 1 step or more at once, not {interval}")
        self.interval = interval
        self._chunk = first
        self._done = False
        self._trials: list[Trial] = []
        self._seconds: list[float] = []

    @property
    def chunk(self) -> int:
        """The chunk size to use now."""
        return self._chunk

    @property
    def done(self) -> bool:
        """Whether `chunk` is the result."""
        return self._done

    @property
    def trials(self) -> tuple[Trial, ...]:
        """What has been measured so far, in that order."""
        return tuple(self._trials)

    def record(self, seconds: float) -> None:
        """Note how long a step took with `chunk`; once done, nothing changes any more."""
        if self._done:
            return
        self._seconds.append(seconds)
        if len(self._seconds) == self.interval:
            interval, self._seconds = self._seconds, []
            self._judge(interval)

    def _stop(self, chunk: int) -> None:
        self._chunk, self._done = chunk, True

    @abstractmethod
    def _judge(self, seconds: Sequence[float]) -> None:
        """Look at the interval that has been recorded with `chunk`, and choose the next one."""


class RuntimeSearch(_Search):
    """Algorithm 1 of Le et al. 2018 (section 4.2), with the paper's names and line numbers.

    It tries 1, 2, ... `step`, then on in steps of `step`, and ends when the chunk size exceeds the
    best by `step` times `range`. Trials are mean seconds. `num_layers` are those of the model.
    """

    def __init__(
        self,
        num_layers: int,
        step: int = 5,
        range: int = 5,  # noqa: A002 - the paper's name
        interval: int = 10,
    ) -> None:
        if num_layers < 1 or step < 1 or range < 1:
            raise ValueError(
                f"num_layers, step and range must be positive: {num_layers}, {step}, {range}"
            )
        super().__init__(1, interval)
        self._num_layers, self._step, self._range = num_layers, step, range
        self._best_chunk, self._lapse_min = 1, inf

    def _judge(self, seconds: Sequence[float]) -> None:
        """Lines 8 to 24. The last interval is run, but not looked at: line 8 comes before 13."""
        if self._chunk >= self._best_chunk + self._step * self._range:
            self._stop(self._best_chunk)
            return
        lapse = fsum(seconds)
        self._trials.append(Trial(self._chunk, None, lapse / self.interval))
        if lapse < self._lapse_min:
            self._lapse_min = lapse
            self._best_chunk = self._chunk
        self._chunk += 1 if self._chunk < self._step else self._step
        # The paper sets no bound, and would go on measuring what is the same as chunks of one.
        if self._chunk >= self._num_layers:
            self._stop(self._best_chunk)


class PredictedSearch(_Search):
    """Measures the size that is predicted to be best, some far from it, and the best's neighbours.

    `predicted` gives seconds per step for each candidate size. The first to be measured are the
    best of them and every third above and below it, in the order of their predictions: a
    prediction that is wrong in its whole shape must not hide what is fast. From the fastest, by the
    median of its interval, the search climbs: a neighbour is the next smaller or larger candidate,
    and it ends when neither is faster. What it returns was the fastest of all its trials.
    """

    def __init__(self, predicted: Mapping[int, float], interval: int = 10) -> None:
        if not predicted:
            raise ValueError("predicted: there must be a chunk size to try")
        self._predicted = dict(sorted(predicted.items()))
        self._sizes = list(self._predicted)
        if self._sizes[0] < 1:
            raise ValueError(f"predicted: a chunk has 1 layer or more, not {self._sizes[0]}")
        self._best = min(self._sizes, key=self._predicted.__getitem__)
        self._far = self._sizes[self._sizes.index(self._best) % _STRIDE :: _STRIDE]
        self._measured: dict[int, float] = {}
        super().__init__(self._best, interval)

    def _judge(self, seconds: Sequence[float]) -> None:
        # The median, because a step that the machine held up says nothing about the size.
        measured_s = self._measured[self._chunk] = median(seconds)
        self._trials.append(Trial(self._chunk, self._predicted[self._chunk], measured_s))
        if measured_s < self._measured[self._best]:
            self._best = self._chunk
        for sizes in (self._far, self._neighbours()):
            untried = [size for size in sizes if size not in self._measured]
            if untried:
                self._chunk = min(untried, key=self._predicted.__getitem__)
                return
        self._stop(self._best)

    def _neighbours(self) -> list[int]:
        place = self._sizes.index(self._best)
        return self._sizes[max(0, place - 1) : place] + self._sizes[place + 1 : place + 2]


def candidates(num_layers: int) -> tuple[int, ...]:
    """Return the chunk sizes worth predicting: 1, 2, 3, 4, 6, 8, 12, 16, 24, ... that differ.

    Each is at most twice the one before: the time of a step changes little between two of them.
    """
    if num_layers < 1:
        raise ValueError(f"candidates: a model has 1 layer or more, not {num_layers}")
    sizes, power = {1}, 2
    while power < num_layers:
        sizes |= {power, power // 2 * 3}
        power *= 2
    return tuple(sorted(size for size in sizes if size == 1 or size < num_layers))
