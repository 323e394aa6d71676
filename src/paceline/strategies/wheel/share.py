"""A worker's share of the samples: which it takes in which step of the whole run."""

from functools import lru_cache

import torch

from paceline.core.errors import InvalidInput
from paceline.data.dataset import Batch, Dataset
from paceline.data.sampler import ShardedBatches


class SampleShare:
    """The batches of one worker, by the step: those of a data-parallel rank.

    A step of all workers has `batch_size` samples, and each worker its part. Raises InvalidInput if
    they cannot be shared so, or a sample may have several labels.
    """

    def __init__(
        self, data: Dataset, batch_size: int, worker: int, workers: int, epochs: int, seed: int
    ) -> None:
        def batches() -> ShardedBatches:
            return ShardedBatches(len(data.train), batch_size, worker, workers, seed)

        def rows_of(epoch: int) -> list[list[int]]:
            of_epoch = batches()  # one of its own, for two threads ask about two epochs
            of_epoch.set_epoch(epoch)
            return list(of_epoch)

        self._rows_of = lru_cache(maxsize=2)(rows_of)
        self._sizes, self._workers = batches().global_sizes, workers
        self._samples = data.train
        self.num_steps = epochs * self.steps_per_epoch

    @property
    def steps_per_epoch(self) -> int:
        """The steps in which every sample is taken once, by some worker."""
        return len(self._sizes)

    def ends_epoch(self, step: int) -> bool:
        """Whether a step is the last of its epoch."""
        return (step + 1) % self.steps_per_epoch == 0

    def weight(self, step: int) -> float:
        """Return what scales the mean loss of the part, so that all samples weigh alike."""
        whole = self._sizes[step % self.steps_per_epoch]
        return len(self.rows(step)) * self._workers / whole

    def rows(self, step: int) -> list[int]:
        """Return the numbers of a step's samples."""
        epoch, place = divmod(step, self.steps_per_epoch)
        return self._rows_of(epoch)[place]

    def batch(self, step: int) -> Batch:
        """Return the inputs and the class numbers of a step; InvalidInput if they are none."""
        inputs, targets = self._samples.__getitems__(self.rows(step))
        if targets.dtype == torch.bool:
            raise InvalidInput("data: samples with several labels cannot be trained on by wheel")
        return inputs, targets
