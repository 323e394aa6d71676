"""The batch of a unit, and the loader that reads it while the device computes."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from paceline.data.batch import Batch
from paceline.data.dataset import IndexedSamples
from paceline.data.sampler import ShardedBatches
from paceline.exchange.step import Share


class Place(NamedTuple):
    """A unit's epoch, its step there, and which part of that step it is."""

    epoch: int
    step: int
    part: int


class UnitBatches:
    """The samples of units: those of data-parallel ranks, of which there are `num_parts`.

    Raises InvalidInput if the samples cannot be shared so.
    """

    def __init__(self, samples: IndexedSamples, batch_size: int, num_parts: int, seed: int) -> None:
        self._samples, self._num_parts = samples, num_parts
        shared = len(samples), batch_size

        def rows_of(epoch: int, part: int) -> list[list[int]]:
            batches = ShardedBatches(*shared, part, num_parts, seed)
            batches.set_epoch(epoch)
            return list(batches)

        # Of two epochs: at their border the next batch is read while the last one is trained on.
        self._rows_of = lru_cache(maxsize=2 * num_parts)(rows_of)
        self.steps_per_epoch = len(ShardedBatches(*shared, 0, num_parts, seed))

    def place(self, unit: int) -> Place:
        """Return where a unit is in the run."""
        step, part = divmod(unit, self._num_parts)
        return Place(*divmod(step, self.steps_per_epoch), part)

    def rows(self, unit: int) -> list[int]:
        """Return the numbers of a unit's samples."""
        epoch, step, part = self.place(unit)
        return self._rows_of(epoch, part)[step]

    def read(self, unit: int) -> Any:
        """Return the samples of a unit."""
        return self._samples.__getitems__(self.rows(unit))


class Prefetched:
    """Yields the batches of units in order, each read while the one before is trained on."""

    def __init__(self, batches: UnitBatches, device: torch.device) -> None:
        self._batches, self._device = batches, device
        self._executor = ThreadPoolExecutor(1, "paceline-load")

    def __call__(self, units: Sequence[int]) -> Iterator[Share]:
        """Yield the batches of these units; an inner step's loss is the mean of its samples."""
        ahead: Future[Any] | None = None
        for number, unit in enumerate(units):
            samples = self._read(unit) if ahead is None else ahead
            following = units[number + 1] if number + 1 < len(units) else None
            ahead = None if following is None else self._read(following)
            yield Share(*Batch.of(samples.result()).to(self._device), 1.0)

    def _read(self, unit: int) -> Future[Any]:
        return self._executor.submit(self._batches.read, unit)

    def close(self) -> None:
        """End the thread that reads."""
        self._executor.shutdown(cancel_futures=True)
