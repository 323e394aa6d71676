"""The batches of one asynchronous worker, by the step."""

from functools import lru_cache

from paceline.training.data.batch import Batch
from paceline.training.data.dataset import IndexedSamples
from paceline.training.data.sampler import ShardedBatches


class SampleShare:
    """The batches of one worker, by the step: those of a data-parallel rank.

    A step of all workers has `batch_size` samples, and each worker its part. The run has
    `num_steps`; the last of its epochs may be cut short. Raises InvalidInput if the samples cannot
    be shared so.
    """

    def __init__(
        self,
        samples: IndexedSamples,
        batch_size: int,
        worker: int,
        workers: int,
        num_steps: int,
        seed: int,
    ) -> None:
        shared = len(samples), batch_size, worker, workers, seed

        def rows_of(epoch: int) -> list[list[int]]:
            batches = ShardedBatches(*shared)  # its own, for two threads ask about two epochs
            batches.set_epoch(epoch)
            return list(batches)

        # Of two epochs: at their border the next batch is read while the last one is trained on.
        self._rows_of = lru_cache(maxsize=2)(rows_of)
        self._sizes, self._workers = ShardedBatches(*shared).global_sizes, workers
        self._samples = samples
        self.steps_per_epoch = len(self._sizes)  # in which some worker takes every sample once
        self.num_steps = num_steps

    def ends_epoch(self, step: int) -> bool:
        """Return True if a step is the last of its epoch."""
        return (step + 1) % self.steps_per_epoch == 0 or step + 1 == self.num_steps

    def weight(self, step: int) -> float:
        """Return the factor of the part's mean loss with which all samples weigh alike."""
        whole = self._sizes[step % self.steps_per_epoch]
        return len(self.rows(step)) * self._workers / whole

    def rows(self, step: int) -> list[int]:
        """Return the numbers of a step's samples."""
        epoch, place = divmod(step, self.steps_per_epoch)
        return self._rows_of(epoch)[place]

    def batch(self, step: int) -> Batch:
        """Return the samples of a step."""
        return Batch.of(self._samples.__getitems__(self.rows(step)))
