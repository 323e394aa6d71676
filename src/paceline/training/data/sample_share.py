"""The batches of one asynchronous worker by step."""

from functools import lru_cache

from paceline.training.data.batch import Batch
from paceline.training.data.dataset import IndexedSamples
from paceline.training.data.sampler import ShardedBatches


class SampleShare:
    """The batches of one worker by step, equal to those of a data-parallel rank.

    A step of all workers has `batch_size` samples, divided among the workers. The last epoch ends
    after `num_steps` steps in total. Raises InvalidInput if the samples cannot be divided.
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
            batches = ShardedBatches(*shared)  # one for each epoch's thread
            batches.set_epoch(epoch)
            return list(batches)

        # Keep two epochs: the next epoch's first batch is read while the last one is trained on.
        self._rows_of = lru_cache(maxsize=2)(rows_of)
        self._sizes, self._workers = ShardedBatches(*shared).global_sizes, workers
        self._samples = samples
        self.steps_per_epoch = len(self._sizes)  # steps of one pass over all samples
        self.num_steps = num_steps

    def ends_epoch(self, step: int) -> bool:
        """Return whether a step is the last of its epoch."""
        return (step + 1) % self.steps_per_epoch == 0 or step + 1 == self.num_steps

    def weight(self, step: int) -> float:
        """Return the factor for this worker's mean loss that gives all samples equal weight."""
        whole = self._sizes[step % self.steps_per_epoch]
        return len(self.rows(step)) * self._workers / whole

    def rows(self, step: int) -> list[int]:
        """Return the indices of a step's samples."""
        epoch, place = divmod(step, self.steps_per_epoch)
        return self._rows_of(epoch)[place]

    def batch(self, step: int) -> Batch:
        """Return the samples of a step."""
        return Batch.of(self._samples.__getitems__(self.rows(step)))
