"""Data sets that return whole batches, and DataLoaders for them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from threading import Lock
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, default_collate
from torch.utils.data import Dataset as TorchDataset

from paceline.core.errors import InvalidInput
from paceline.links.shared_memory import available_nbytes
from paceline.training.data.sampler import BalancedSampler, ShardedBatches

Pair = tuple[Tensor, Tensor]  # inputs and targets
Shape = tuple[int, ...]  # shape of one sample


class IndexedSamples(ABC):
    """A map-style data set that returns whole batches, for torch's DataLoader.

    A sample is a pair of inputs and targets, or another pytree of tensors. For classification,
    inputs are float32, and targets are int64 class numbers. For text, inputs and targets are int64
    tokens (length,); the loss ignores positions whose target is -100.
    """

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, index: int) -> Any:
        """Return one sample."""
        return tree_map(lambda leaf: leaf[0], self.__getitems__([index]))

    @abstractmethod
    def __getitems__(self, indices: Sequence[int]) -> Any:
        """Return one batch: the pytree of a sample, whose tensors have a row for each index."""


@dataclass(frozen=True, eq=False)
class TensorSamples(IndexedSamples):
    """Samples in memory; reading a batch takes one index operation for each tensor."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> Pair:
        return self.inputs[index], self.targets[index]

    def __getitems__(self, indices: Sequence[int]) -> Pair:
        rows = torch.as_tensor(indices, dtype=torch.int64)
        # index_select is faster than indexing, except on expanded tensors.
        is_plain = self.inputs.is_contiguous()
        inputs = self.inputs.index_select(0, rows) if is_plain else self.inputs[rows]
        return inputs, self.targets.index_select(0, rows)


Read = Callable[[Tensor], Any]  # reads a batch, given the samples' indices (N,)


def reader_of(samples: IndexedSamples) -> Read:
    """Return a function that reads a batch, given the samples' indices (N,).

    Several threads may call the returned function, but only samples in memory are read in parallel.
    """
    if isinstance(samples, TensorSamples):
        return samples.__getitems__  # type: ignore[return-value]  # also accepts a tensor
    reading = Lock()

    def read(rows: Tensor) -> Any:
        with reading:
            return samples.__getitems__(rows.tolist())

    return read


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and test samples; every input has `sample_shape`.

    `num_classes`: number of classes; for text, the vocabulary size.
    """

    name: str
    train: IndexedSamples
    test: IndexedSamples
    num_classes: int
    sample_shape: Shape


def loader(
    samples: IndexedSamples, batches: ShardedBatches | BalancedSampler, *, num_workers: int = 0
) -> DataLoader[Any]:
    """Return a DataLoader of one rank's batches, in the order of `batches`.

    Call `batches.set_epoch` before each pass. `num_workers`: number of worker processes, which
    decode image files; it must be 0 for samples in memory. Torch's global random state does not
    change. Raises InvalidInput if `batches` is made for another number of samples, or if samples in
    memory are given worker processes.
    """
    if len(samples) != batches.num_samples:
        problem = f"must have num_samples={len(samples)}, the size of the data set"
        raise InvalidInput("batches", problem, got=batches.num_samples)
    if num_workers and isinstance(samples, TensorSamples):
        raise InvalidInput("num_workers", "must be 0 for samples in memory", got=num_workers)
    return DataLoader(
        cast("TorchDataset[Any]", samples),  # `samples` has all methods that DataLoader calls
        batch_sampler=batches,
        collate_fn=_unchanged,  # `__getitems__` already returns a batch
        num_workers=num_workers,
        # Keep the processes: restarting them could take longer than an epoch of a small data set.
        persistent_workers=num_workers > 0,
        # Without a generator, the DataLoader would draw a seed from torch's global random state.
        generator=torch.Generator().manual_seed(batches.seed % 2**64),
    )


def _unchanged(batch: Any) -> Any:
    return batch


def require_memory(num_samples: int, sample_shape: Shape, field: str = "data") -> None:
    """Raise InvalidInput if float32 samples of this shape exceed this machine's free memory."""
    require_nbytes(
        4 * num_samples * prod(sample_shape),
        field,
        f"{num_samples} samples of {shape_text(sample_shape)} float32 values",
        "use fewer or smaller samples",
    )


def require_nbytes(nbytes: int, field: str, what: str, instead: str) -> None:
    """Raise InvalidInput if less than `nbytes` bytes of memory are free.

    `field`, `what` (the data to be stored) and `instead` (the hint) are parts of the message.
    """
    available = available_nbytes()
    if nbytes > available:
        needed, free = (f"{size / 2**30:,.1f} GiB" for size in (nbytes, available))
        problem = f"{what} would need {needed} of memory, but only {free} are free"
        raise InvalidInput(field, problem, hint=instead)


def shape_text(shape: Shape) -> str:
    """Format a shape as text, such as "3x224x224"."""
    return "x".join(map(str, shape))


class Collate:
    """A `collate_fn` for DataLoader that calls `collate`, and also supports empty batches.

    For an empty list of samples, it makes a batch of the first sample, and cuts it to zero rows.
    `samples`: the DataLoader's data set.
    """

    def __init__(self, samples: Any, collate: Callable[[list[Any]], Any] = default_collate) -> None:
        self._samples, self._collate = samples, collate

    def __call__(self, batch: list[Any]) -> Any:
        """Return the batch of a list of samples, which may be empty."""
        if len(batch):
            return self._collate(batch)
        return tree_map(
            lambda leaf: leaf[:0] if isinstance(leaf, Tensor) and leaf.ndim else leaf,
            self._collate([self._samples[0]]),
        )
