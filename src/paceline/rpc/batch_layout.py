"""Describe the tensors of a recipe's batches, and send targets from a worker to the hub.

    worker                                      hub
    inputs  -> the model's first layers
    targets -- bytes of each tensor --------->  the same pytree of tensors, for the loss

Hub and worker derive structure, shapes and dtypes from their own copies of the data. If a batch is
a mapping, the mapping serves as inputs and as targets.
"""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, keystr, tree_flatten_with_path, tree_unflatten

from paceline.core.errors import InvalidInput
from paceline.rpc.tensor_parts import Parts, part_of
from paceline.training.data.batch import Batch
from paceline.training.recipes.recipe import Recipe, described


class _Leaf(NamedTuple):
    """The shape and dtype of one tensor in a sample.

    `name`: the tensor's path in the sample's pytree. `wire_dtype`: its dtype in messages.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    wire_dtype: torch.dtype

    @property
    def text(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


class _Structure(NamedTuple):
    """Describes the pytree of one sample's inputs or targets, and the pytree's tensors."""

    tree: TreeSpec
    leaves: tuple[_Leaf, ...]

    @classmethod
    def of(cls, first: Any) -> "_Structure":
        """Derive the structure from the inputs or targets of a batch with one sample."""
        found, tree = tree_flatten_with_path(first)
        # Booleans are sent as uint8, because a received byte above 1 is not a valid boolean.
        wire = {torch.bool: torch.uint8}
        own = (
            _Leaf(keystr(path), tuple(leaf.shape[1:]), leaf.dtype, wire.get(leaf.dtype, leaf.dtype))
            for path, leaf in found
        )
        return cls(tree, tuple(own))

    def leaves_of(self, tree: Any) -> list[Tensor] | None:
        """Return the tensors of a batch's inputs or targets; None for wrong dtypes or shapes."""
        try:
            found = self.tree.flatten_up_to(tree)
        except (ValueError, TypeError):
            return None
        fits = (
            isinstance(leaf, Tensor)
            and (leaf.dtype, tuple(leaf.shape[1:])) == (own.dtype, own.shape)
            for leaf, own in zip(found, self.leaves, strict=True)
        )
        return found if all(fits) else None

    def as_json(self) -> dict[str, str]:
        """Return dtype and shape of each tensor of one sample, by its path in the pytree."""
        return {leaf.name or "tensor": leaf.text for leaf in self.leaves}


class BatchLayout:
    """The structure, shapes and dtypes of a recipe's batches, taken from its first sample."""

    def __init__(self, recipe: Recipe) -> None:
        first = Batch.of(recipe.samples.__getitems__([0]))
        self._name = recipe.name
        self._inputs, targets = _Structure.of(first.inputs), _Structure.of(first.targets)
        if not targets.leaves:
            raise InvalidInput(recipe.name, "has samples without targets for the loss")
        self._num_classes: int | None = None
        if recipe.target_nbytes(1) is None:
            self._num_classes = recipe.num_classes
            (numbers,) = targets.leaves  # class indices, sent as int32 (Du et al. 2017, Table 1)
            targets = targets._replace(leaves=(numbers._replace(wire_dtype=torch.int32),))
        self._targets = targets

    @property
    def num_parts(self) -> int:
        """The number of message parts for the targets: one per tensor."""
        return len(self._targets.leaves)

    def as_json(self) -> dict[str, dict[str, str]]:
        """Return dtypes and shapes of inputs and targets; must be equal at hub and workers."""
        return {"inputs": self._inputs.as_json(), "targets": self._targets.as_json()}

    def check(self, batch: Batch) -> Batch:
        """Return the batch; InvalidInput if its shapes or dtypes differ from the first sample's."""
        parts = (("inputs", self._inputs), ("targets", self._targets))
        for (what, own), found in zip(parts, batch, strict=True):
            if own.leaves_of(found) is None:
                problem = f"must have {what} like those of the first sample, {own.as_json()}"
                hint = "pad or cut samples in the data set, or in the recipe's collate"
                raise InvalidInput(self._name, problem, got=described(found), hint=hint)
        return batch

    def parts(self, batch: Batch) -> Parts:
        """Return the targets of a checked batch as message parts, one per tensor."""
        leaves = self._targets.leaves_of(batch.targets)
        assert leaves is not None
        return tuple(
            part_of(leaf.to(own.wire_dtype).contiguous())
            for leaf, own in zip(leaves, self._targets.leaves, strict=True)
        )

    def check_parts(self, parts: Parts, count: int) -> None:
        """Raise InvalidInput unless each received part has the size of `count` samples' targets."""
        for part, own in zip(parts, self._targets.leaves, strict=True):
            expected = count * prod(own.shape) * own.wire_dtype.itemsize
            if part.nbytes != expected:
                problem = f"must have {expected:,} bytes: {count} samples of {own.text}"
                raise InvalidInput(f"targets{own.name}", problem, got=part.nbytes)

    def targets(self, buffers: Sequence[Tensor], count: int) -> Any:
        """Rebuild the targets of `count` samples from received bytes.

        Raises InvalidInput for a class index out of range.
        """
        leaves = [
            buffer.view(own.wire_dtype).to(own.dtype).view(count, *own.shape)
            for buffer, own in zip(buffers, self._targets.leaves, strict=True)
        ]
        if self._num_classes is not None:
            # On a GPU, a class index out of range would make the loss abort the hub's process.
            (labels,) = leaves
            if not bool(((labels >= 0) & (labels < self._num_classes)).all()):
                raise InvalidInput("targets", f"must be class indices below {self._num_classes}")
        return tree_unflatten(leaves, self._targets.tree)
