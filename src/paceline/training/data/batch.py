"""Batches: pytrees of tensors that have one row for each sample.

A sample is a pair of inputs and targets, or a mapping. If samples are mappings, the model receives
the batch's fields as keyword arguments, and the loss receives the whole batch.

    sample                               model call                   loss call
    (image, class)                       model(images)                loss(outputs, classes)
    ((tokens, mask), next)               model(tokens, mask)          loss(outputs, next)
    {"input_ids": ..., "labels": ...}    model(input_ids=..., ...)    loss(outputs, batch)
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import IterableDataset

from paceline.core.error_lines import blaming
from paceline.core.errors import InvalidInput, first_line
from paceline.training.data.dataset import Collate, IndexedSamples
from paceline.training.data.sampler import ShardedBatches


class MapDataset(Protocol):
    """A map-style data set, such as torch's."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, index: int, /) -> Any:
        """Return one sample."""


class Batch(NamedTuple):
    """A batch: inputs and targets, each a pytree of tensors."""

    inputs: Any
    targets: Any

    @classmethod
    def of(cls, samples: Any) -> "Batch":
        """Make a batch of a collated pair (inputs, targets), or of a collated mapping.

        A mapping is used both as inputs and as targets. Raises InvalidInput for other types.
        """
        if isinstance(samples, Mapping):
            return cls(samples, samples)
        if isinstance(samples, tuple | list) and len(samples) == 2:
            return cls(*samples)
        kind = type(samples).__name__
        shown = f"{kind} of {len(samples)}" if isinstance(samples, tuple | list) else kind
        problem = "must have samples that are pairs (inputs, targets) or mappings"
        raise InvalidInput("train", problem, got=shown)

    def to(self, device: torch.device) -> "Batch":
        """Copy the batch to a device."""
        return self._map(
            lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf
        )

    def split(self, count: int, num_samples: int) -> list["Batch"]:
        """Split this batch of `num_samples` samples into `count` batches of nearly equal size."""
        cuts = [num_samples * i // count for i in range(count + 1)]
        return [self.rows(slice(*cut)) for cut in pairwise(cuts)]

    def rows(self, rows: slice) -> "Batch":
        """Return a batch of the samples at the indices of the slice `rows`."""
        return self._map(lambda leaf: leaf[rows])

    def _map(self, function: Callable[[Any], Any]) -> "Batch":
        inputs = tree_map(function, self.inputs)
        is_same = self.targets is self.inputs
        return Batch(inputs, inputs if is_same else tree_map(function, self.targets))


def call(model: Callable[..., Any], inputs: Any) -> Any:
    """Call a model with inputs: one tensor, a sequence of arguments, or a mapping."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    return model(inputs)


class CollatedSamples(IndexedSamples):
    """Wraps a map-style data set so that it returns collated batches; errors name the samples."""

    def __init__(self, dataset: MapDataset, collate: Callable[[list[Any]], Any], name: str) -> None:
        self.dataset, self._name = dataset, name
        self._collate = Collate(dataset, collate)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, indices: Sequence[int]) -> Any:
        samples = []
        for index in indices:
            try:
                samples.append(self.dataset[int(index)])
            except (Exception, SystemExit) as error:
                problem = f"reading sample {index} failed: {first_line(error)}"
                raise InvalidInput(self._name, problem) from error
        shown = ", ".join(map(str, list(indices)[:3]))
        hint = "give all samples the same shape, or give the recipe a collate function"
        with blaming(self._name, f"collating samples {shown}, ... failed", hint=hint):
            batch = self._collate(samples)
        check_tensors(batch, self._name)
        return batch


def check_tensors(batch: Any, name: str) -> None:
    """Raise InvalidInput unless all leaves of `batch` are tensors with the same number of rows."""
    leaves = tree_leaves(batch)
    sizes = {len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim}
    other = [leaf for leaf in leaves if not isinstance(leaf, Tensor) or not leaf.ndim]
    if other or len(sizes) != 1:
        found = type(other[0]).__name__ if other else f"tensors of {sorted(sizes)} rows"
        problem = "must have batches that consist of tensors with one row for each sample"
        raise InvalidInput(name, problem, got=found)


def shapes_of(batch: Any) -> str:
    """Describe a batch by the shapes of its tensors, for errors."""
    return ", ".join(str(tuple(tensor.shape)) for tensor in tree_leaves(batch))


def batches_of(
    dataset: MapDataset, collate: Callable[[list[Any]], Any], name: str
) -> IndexedSamples:
    """Wrap a data set so that it returns whole batches; return `IndexedSamples` unchanged.

    `name`: the data set's name in errors. Raises InvalidInput if the data set is empty or not
    map-style.
    """
    is_stream = isinstance(dataset, IterableDataset)
    if is_stream or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        problem = "must have map-style data sets, with __len__ and __getitem__"
        raise InvalidInput(name, problem, got=type(dataset).__name__)
    if not len(dataset):
        raise InvalidInput(name, "has a data set without samples")
    if isinstance(dataset, IndexedSamples):
        return dataset
    return CollatedSamples(dataset, collate, name)


class SampleShare:
    """Reads the batch of one worker for each step; `ShardedBatches` chooses the samples.

    `batch_size`: number of samples per step on all workers together. `num_steps`: number of steps
    in all epochs together. In the methods, step 0 is the first of training, not of an epoch.
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

        # Cache two epochs: the next epoch's first batch is read during this epoch's last step.
        @lru_cache(maxsize=2)
        def rows_of(epoch: int) -> list[list[int]]:
            # Make a new sampler: another thread could change the epoch of a shared sampler.
            batches = ShardedBatches(*shared)
            batches.set_epoch(epoch)
            return list(batches)

        self._rows_of = rows_of
        self._samples = samples
        self.steps_per_epoch = len(ShardedBatches(*shared))  # steps of one pass over all samples
        self.num_steps = num_steps

    def ends_epoch(self, step: int) -> bool:
        """Return whether a step is the last of its epoch or of the whole training."""
        return (step + 1) % self.steps_per_epoch == 0 or step + 1 == self.num_steps

    def rows(self, step: int) -> list[int]:
        """Return the indices of this worker's samples in a step."""
        epoch, place = divmod(step, self.steps_per_epoch)
        return self._rows_of(epoch)[place]

    def batch(self, step: int) -> Batch:
        """Return this worker's samples in a step."""
        return Batch.of(self._samples.__getitems__(self.rows(step)))
