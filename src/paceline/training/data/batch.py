"""Batches: pytrees of tensors whose first dimension is the samples.

A sample is a pair of inputs and targets, or a mapping: the model receives its fields as keyword
arguments, and the loss receives the whole mapping.

    (image, class)                       model(images)                loss(outputs, classes)
    ((tokens, mask), next)               model(tokens, mask)          loss(outputs, next)
    {"input_ids": ..., "labels": ...}    model(input_ids=..., ...)    loss(outputs, batch)
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import IterableDataset

from paceline.core.errors import InvalidInput, first_line
from paceline.training.data.dataset import Collate, IndexedSamples


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
        """Split a collated batch into inputs and targets; InvalidInput for other structures."""
        if isinstance(samples, Mapping):
            return cls(samples, samples)
        if isinstance(samples, tuple | list) and len(samples) == 2:
            return cls(*samples)
        kind = type(samples).__name__
        shown = f"{kind} of {len(samples)}" if isinstance(samples, tuple | list) else kind
        raise InvalidInput(
            "train",
            "a sample must be a pair (inputs, targets), or a mapping that is both",
            hint=f"this one is a {shown}",
        )

    def to(self, device: torch.device) -> "Batch":
        """Copy the batch to a device."""
        if self.targets is self.inputs:
            moved = _moved(self.inputs, device)
            return Batch(moved, moved)
        return Batch(_moved(self.inputs, device), _moved(self.targets, device))

    def split(self, count: int, num_samples: int) -> list["Batch"]:
        """Split the samples into `count` parts whose sizes differ by at most one."""
        cuts = [num_samples * i // count for i in range(count + 1)]
        return [self.rows(slice(*cut)) for cut in pairwise(cuts)]

    def rows(self, rows: slice) -> "Batch":
        """Return a range of the samples."""
        inputs = tree_map(lambda leaf: leaf[rows], self.inputs)
        if self.targets is self.inputs:
            return Batch(inputs, inputs)
        return Batch(inputs, tree_map(lambda leaf: leaf[rows], self.targets))


def _moved(tree: Any, device: torch.device) -> Any:
    return tree_map(
        lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf, tree
    )


def call(model: Callable[..., Any], inputs: Any) -> Any:
    """Call a model with inputs: one tensor, a sequence of arguments, or a mapping."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    return model(inputs)


class CollatedSamples(IndexedSamples):
    """A map-style data set that returns whole batches.

    Raises InvalidInput with the sample's index if the data set fails, or its samples cannot be
    collated.
    """

    def __init__(self, dataset: MapDataset, collate: Callable[[list[Any]], Any], name: str) -> None:
        self.dataset, self._name = dataset, name
        self._collate = Collate(dataset, collate)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getitems__(self, indices: Sequence[int]) -> Any:
        samples = []
        for index in indices:
            try:
                samples.append(self.dataset[int(index)])
            except (Exception, SystemExit) as error:
                raise InvalidInput(
                    self._name, f"sample {index} of its data cannot be read: {first_line(error)}"
                ) from error
        try:
            batch = self._collate(samples)
        except (Exception, SystemExit) as error:
            shown = ", ".join(map(str, list(indices)[:3]))
            raise InvalidInput(
                self._name,
                f"samples {shown}, ... cannot be made a batch: {first_line(error)}",
                hint="samples need equal shapes, or the recipe a collate of its own",
            ) from error
        check_tensors(batch, self._name)
        return batch


def check_tensors(batch: Any, name: str) -> None:
    """Raise InvalidInput unless all leaves are tensors with one row for each sample."""
    leaves = tree_leaves(batch)
    sizes = {len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim}
    other = [leaf for leaf in leaves if not isinstance(leaf, Tensor) or not leaf.ndim]
    if other or len(sizes) != 1:
        found = type(other[0]).__name__ if other else f"tensors of {sorted(sizes)} rows"
        raise InvalidInput(
            name,
            f"a batch has {found}",
            hint="it must consist of tensors with one row for each sample",
        )


def batches_of(
    dataset: MapDataset, collate: Callable[[list[Any]], Any], name: str
) -> IndexedSamples:
    """Wrap a data set so that it returns whole batches; InvalidInput if it is empty.

    Paceline's own data sets are returned unchanged.
    """
    is_stream = isinstance(dataset, IterableDataset)
    if is_stream or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise InvalidInput(
            name,
            f"its data are a {type(dataset).__name__}, which has no samples by number",
            hint="a recipe needs a map-style data set, with __len__ and __getitem__",
        )
    if not len(dataset):
        raise InvalidInput(name, "its data have no samples")
    if isinstance(dataset, IndexedSamples):
        return dataset
    return CollatedSamples(dataset, collate, name)
