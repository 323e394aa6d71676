"""Data sets: samples that hand out whole batches, for training and for testing."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, default_collate
from torch.utils.data import Dataset as TorchDataset

from paceline.core.errors import InvalidInput
from paceline.links.shared_memory import available_nbytes
from paceline.training.data.sampler import BalancedSampler, ShardedBatches

Batch = tuple[Tensor, Tensor]
Shape = tuple[int, ...]  # of a sample


class IndexedSamples(ABC):
    """Samples by their numbers, which hand out whole batches. Usable in a torch DataLoader.

    A sample is a pair of inputs and targets, or any other pytree of tensors that a recipe trains
    on. Of data sets for classification the inputs are float32, and a target is an int64 class
    number; or, where a sample may have several labels, a bool for each label. Inputs of text are
    int64 tokens, and a target is a token for each place, or -100 where none is asked for.
    """

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def __getitem__(self, index: int) -> Any:
        """Return one sample."""

    @abstractmethod
    def __getitems__(self, indices: Sequence[int]) -> Any:
        """Return these samples as a batch: the same pytree, each tensor with a row for each."""


@dataclass(frozen=True, eq=False)
class TensorSamples(IndexedSamples):
    """Samples that lie in memory. A batch costs one index operation on each tensor."""

    inputs: Tensor
    targets: Tensor

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.targets):
            raise ValueError(f"{len(self.inputs)} inputs but {len(self.targets)} targets")

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> Batch:
        return self.inputs[index], self.targets[index]

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        rows = torch.as_tensor(indices, dtype=torch.int64)
        # index_select is faster, except on expanded channels, which it copies one by one.
        is_plain = self.inputs.is_contiguous()
        inputs = self.inputs.index_select(0, rows) if is_plain else self.inputs[rows]
        return inputs, self.targets.index_select(0, rows)


@dataclass(frozen=True, eq=False)
class Dataset:
    """A classification task; every input has `sample_shape`, class numbers are 0..num_classes-1.

    `num_classes` is the number of labels where a sample may have several. Of text it is the
    vocabulary: each token of a sample is a class, and so is each that is to be found.
    """

    name: str
    train: IndexedSamples
    test: IndexedSamples
    num_classes: int
    sample_shape: Shape


def loader(
    samples: IndexedSamples, batches: ShardedBatches | BalancedSampler, *, num_workers: int = 0
) -> DataLoader[Any]:
    """Return the batches of one rank; the order is the one of `batches`.

    Call `batches.set_epoch` before each pass. `num_workers` processes decode image files; samples
    in memory are read by the training process itself, so there it must be 0. torch's global random
    state is left alone. Raises InvalidInput if the arguments do not fit each other.
    """
    if len(samples) != batches.num_samples:
        raise InvalidInput(
            "batches",
            f"the batches were made for {batches.num_samples} samples, but there are "
            f"{len(samples)}",
        )
    if num_workers and isinstance(samples, TensorSamples):
        raise InvalidInput("num_workers", "must be 0 for samples in memory", got=num_workers)
    return DataLoader(
        cast("TorchDataset[Any]", samples),  # torch asks for __getitem__, whatever its type says
        batch_sampler=batches,
        collate_fn=_unchanged,
        num_workers=num_workers,
        # Starting processes again for every epoch would take longer than a small epoch.
        persistent_workers=num_workers > 0,
        # A DataLoader draws a seed for its workers: without this, from torch's global state.
        generator=torch.Generator().manual_seed(batches.seed % 2**64),
    )


def _unchanged(batch: Any) -> Any:
    # torch declares a list of samples here; what it passes on is what __getitems__ returned.
    return batch


def require_memory(num_samples: int, sample_shape: Shape, field: str = "data") -> None:
    """Raise InvalidInput if float32 samples of this shape exceed this machine's free memory."""
    require_nbytes(
        4 * num_samples * prod(sample_shape),
        field,
        f"{num_samples} samples of {shape_text(sample_shape)} float32 values",
        "take fewer or smaller samples",
    )


def require_nbytes(nbytes: int, field: str, what: str, instead: str) -> None:
    """Raise InvalidInput about a field if `nbytes` exceed this machine's free memory.

    The error says `what` takes so many, and what to do `instead`.
    """
    available = available_nbytes()
    if nbytes > available:
        raise InvalidInput(
            field,
            f"{what} would take {nbytes / 2**30:,.1f} GiB, but this machine has "
            f"{available / 2**30:,.1f} GiB of free memory",
            hint=instead,
        )


def shape_text(shape: Shape) -> str:
    """Return a shape as it is written in a spec: 3x224x224."""
    return "x".join(map(str, shape))


class Collate:
    """A `collate_fn` for a DataLoader that knows what a batch of no samples looks like.

    It does what `collate` does; of no samples it makes what `collate` makes of the first of
    `samples`, the data set of the DataLoader, with all rows taken away.
    """

    def __init__(self, samples: Any, collate: Callable[[list[Any]], Any] = default_collate) -> None:
        self._samples, self._collate = samples, collate

    def __call__(self, batch: list[Any]) -> Any:
        """Return the batch of these samples."""
        if len(batch):
            return self._collate(batch)
        return tree_map(
            lambda leaf: leaf[:0] if isinstance(leaf, Tensor) and leaf.ndim else leaf,
            self._collate([self._samples[0]]),
        )
