"""Chunks of layers whose gradients are exchanged together, and searches for the best size.

Searches run during training, and measure the time of steps (Le et al. 2018, sections 4.1 and 4.2).
They try only sizes below the number of layers. From that size on, `chunks` makes every layer a
chunk of its own, as for size 1.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from math import fsum, inf
from statistics import fmean, linear_regression, median
from typing import NamedTuple


def chunks(num_layers: int, size: int) -> list[range]:
    """Group layers into chunks of `size`; layers whose gradients come last stay single.

    Layers are numbered from 0 in the order in which backward computes their gradients. The last
    `num_layers` % `size` layers stay single or, if there is no remainder, the last `size` layers.
    No computation hides the last exchanges, so their chunks are small.
    """
    whole = num_layers // size - (1 if num_layers % size == 0 else 0)
    together = [range(i * size, (i + 1) * size) for i in range(whole)]
    return together + [range(i, i + 1) for i in range(whole * size, num_layers)]


_STRIDE = 3  # a search first measures every third candidate size


class Trial(NamedTuple):
    """A tried chunk size, with predicted (None: unknown) and measured seconds per step."""

    chunk: int
    predicted_s: float | None
    measured_s: float


class ChunkTimes(NamedTuple):
    """A chunk's bytes, and two points in time of its exchange, in seconds of the same clock.

    `ready_s`: when all ranks had delivered the chunk. `summed_s`: when the sum was ready.
    """

    nbytes: int
    ready_s: float
    summed_s: float


class ChunkTuner(ABC):
    """Searches for the fastest chunk size; may change the size after every `interval` steps.

    `chunk`: the current size or, once `done` is true, the fastest. `trials`: the sizes measured so
    far.
    """

    def __init__(self, interval: int, chunk: int = 1) -> None:
        self.interval, self.chunk, self.done = interval, chunk, False
        self.trials: tuple[Trial, ...] = ()
        self._seconds: list[float] = []

    def record(self, seconds: float, times: Sequence[ChunkTimes] = ()) -> None:
        """Record a step's seconds and, if known, chunk times; does nothing if `done`."""
        if self.done:
            return
        self._seconds.append(seconds)
        if len(self._seconds) == self.interval:
            interval, self._seconds = self._seconds, []
            self._judge(interval)

    @abstractmethod
    def _judge(self, seconds: Sequence[float]) -> None:
        """Evaluate the finished interval, and choose the next size."""


class RuntimeSearch(ChunkTuner):
    """Algorithm 1 of Le et al. 2018 (section 4.2), with the paper's names and line numbers.

    Tries sizes 1, 2, ... `step`, then multiples of `step`. Ends when the size reaches `num_layers`,
    or is `step` * `range` above the best size so far. A trial's time is the mean over its steps.
    """

    def __init__(
        self,
        num_layers: int,
        step: int = 5,
        range: int = 5,  # noqa: A002 - the paper's name
        interval: int = 10,
    ) -> None:
        super().__init__(interval)
        self._num_layers, self._step, self._range = num_layers, step, range
        self._best_chunk, self._lapse_min = 1, inf

    def _judge(self, seconds: Sequence[float]) -> None:
        """Carry out lines 8 to 24 of Algorithm 1; end the search if the size is out of range."""
        if self.chunk < self._best_chunk + self._step * self._range:
            lapse = fsum(seconds)
            self.trials += (Trial(self.chunk, None, lapse / self.interval),)
            if lapse < self._lapse_min:
                self._lapse_min = lapse
                self._best_chunk = self.chunk
            self.chunk += 1 if self.chunk < self._step else self._step
            # Unlike the paper, stop at `num_layers`: larger sizes have the same effect as size 1.
            if self.chunk < self._num_layers:
                return
        self.chunk, self.done = self._best_chunk, True


class PredictedSearch(ChunkTuner):
    """Finds the fastest chunk size among candidates by measuring the most promising ones.

    `predicted`: seconds per step of each candidate size. The search first measures the candidate
    with the best prediction, and every third candidate above and below it, so that a wrong
    prediction does not hide a fast size. Then it measures the two neighbours of the fastest
    candidate, until neither neighbour is faster.
    """

    def __init__(self, predicted: Mapping[int, float], interval: int = 10) -> None:
        self._predicted, self._sizes = predicted, sorted(predicted)
        best = min(self._sizes, key=predicted.__getitem__)
        self._far = self._sizes[self._sizes.index(best) % _STRIDE :: _STRIDE]
        self._measured: dict[int, float] = {}
        super().__init__(interval, best)

    def _judge(self, seconds: Sequence[float]) -> None:
        # The median ignores steps delayed by other programs.
        measured_s = self._measured[self.chunk] = median(seconds)
        self.trials += (Trial(self.chunk, self._predicted[self.chunk], measured_s),)
        best = min(self._measured, key=self._measured.__getitem__)
        place = self._sizes.index(best)
        neighbours = self._sizes[max(0, place - 1) : place + 2]
        for sizes in (self._far, neighbours):
            untried = [size for size in sizes if size not in self._measured]
            if untried:
                self.chunk = min(untried, key=self._predicted.__getitem__)
                return
        self.chunk, self.done = best, True


class LearnedSearch(PredictedSearch):
    """Predicts the step time of every size from real steps, then searches like `PredictedSearch`.

    In the first `learning` steps every layer is a chunk. These steps show when each layer's
    gradients are ready, and how exchange time depends on bytes; `trials` does not include them.
    """

    def __init__(self, num_layers: int, interval: int = 10, learning: int = 3) -> None:
        super().__init__({1: 0.0}, learning)
        self._num_layers, self._after = num_layers, interval
        self._times: list[Sequence[ChunkTimes]] | None = []  # None after the learning steps
        self.done = num_layers == 1

    def record(self, seconds: float, times: Sequence[ChunkTimes] = ()) -> None:
        """Record the seconds and the chunk times of a step."""
        if self._times is not None and times:
            self._times.append(times)
        super().record(seconds)

    def _judge(self, seconds: Sequence[float]) -> None:
        if self._times is None:
            super()._judge(seconds)
            return
        predicted = predict(median(seconds), self._times, candidates(self._num_layers))
        self._times = None
        # From now on, search like `PredictedSearch`, with these predictions and no trials yet.
        super().__init__(predicted, self._after)


def predict(
    step_s: float, steps: Sequence[Sequence[ChunkTimes]], sizes: Sequence[int]
) -> dict[int, float]:
    """Predict the seconds of a step for each chunk size.

    `steps`: chunk times of steps in which every layer was a chunk. `step_s`: duration of such a
    step, returned for all sizes if `steps` is empty. Assumes that chunks are exchanged one after
    another, and that a delay of the last sum, compared to single layers, delays the step equally.
    """
    if not steps:
        return dict.fromkeys(sizes, step_s)
    layers = [
        (
            column[0].nbytes,
            median(one.ready_s - step[0].ready_s for one, step in zip(column, steps, strict=True)),
        )
        for column in zip(*steps, strict=True)
    ]
    exchanges: list[tuple[float, float]] = []  # bytes of a chunk, and seconds of its exchange
    for step in steps:
        before = 0.0
        for one in step:
            # An exchange starts when the chunk is ready and the previous exchange is done.
            exchanges.append((one.nbytes, one.summed_s - max(one.ready_s, before)))
            before = one.summed_s
    all_nbytes, all_s = zip(*exchanges, strict=True)
    differ = len(set(all_nbytes)) > 1
    seconds_per_byte = max(0.0, linear_regression(all_nbytes, all_s).slope) if differ else 0.0
    latency_s = max(0.0, fmean(all_s) - seconds_per_byte * fmean(all_nbytes))

    def last_sum_s(size: int) -> float:
        end = 0.0
        for members in chunks(len(layers), size):
            nbytes = sum(layers[i][0] for i in members)
            ready_s = max(layers[i][1] for i in members)
            end = max(end, ready_s) + latency_s + nbytes * seconds_per_byte
        return end

    alone = last_sum_s(1)
    return {size: step_s + last_sum_s(size) - alone for size in sizes}


def candidates(num_layers: int) -> tuple[int, ...]:
    """Return the chunk sizes to predict: 1, 2, 3, 4, 6, 8, 12, ..., up to `num_layers` - 1.

    Leaves out sizes in between, because step times change little between neighbouring sizes.
    """
    sizes, power = {1}, 2
    while power < num_layers:
        sizes |= {power, power // 2 * 3}
        power *= 2
    return tuple(sorted(size for size in sizes if size == 1 or size < num_layers))
