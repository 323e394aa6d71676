"""The structure of a recipe's batches, and their targets as they travel from worker to hub.

    body                                        hub
    inputs  -> the body                         structure, shapes and types of its own first sample
    targets -- raw values, leaf by leaf ----->  the same pytree, for the loss

A sample that is both inputs and targets, a mapping, travels whole: which of its fields the loss
reads nobody knows.
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
    """A tensor of one sample: where it stands in the pytree, and its type as it travels."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    travels_as: torch.dtype

    @property
    def text(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


class _Structure(NamedTuple):
    """The structure of a batch's inputs, or of its targets."""

    tree: TreeSpec
    leaves: tuple[_Leaf, ...]

    @classmethod
    def of(cls, first: Any) -> "_Structure":
        """Return the structure of a batch of one sample."""
        found, tree = tree_flatten_with_path(first)
        # Memory that comes is a bool only where its bytes are 0 or 1.
        own = (
            _Leaf(
                keystr(path),
                tuple(leaf.shape[1:]),
                leaf.dtype,
                torch.uint8 if leaf.dtype == torch.bool else leaf.dtype,
            )
            for path, leaf in found
        )
        return cls(tree, tuple(own))

    def leaves_of(self, tree: Any) -> list[Tensor] | None:
        """Return the tensors of a batch, or None if these are not like the first sample's."""
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
        """Return the shape and type of each leaf of one sample, by its place."""
        return {leaf.name or "tensor": leaf.text for leaf in self.leaves}


class BatchLayout:
    """The structure, shapes and types of a recipe's batches: those of its first sample.

    Class numbers below `recipe.num_classes` travel as 32-bit integers, as in the paper's Table 1.
    Raises InvalidInput for a sample without targets.
    """

    def __init__(self, recipe: Recipe) -> None:
        first = Batch.of(recipe.samples.__getitems__([0]))
        self._name = recipe.name
        self._inputs, targets = _Structure.of(first.inputs), _Structure.of(first.targets)
        if not targets.leaves:
            raise InvalidInput(recipe.name, "a sample of its data has no targets for the loss")
        self._num_classes: int | None = None
        if recipe.target_nbytes(1) is None:
            self._num_classes = recipe.num_classes
            (numbers,) = targets.leaves
            targets = targets._replace(leaves=(numbers._replace(travels_as=torch.int32),))
        self._targets = targets

    @property
    def num_parts(self) -> int:
        """The parts of a message that the targets are: one for each leaf."""
        return len(self._targets.leaves)

    @property
    def nbytes(self) -> int:
        """The bytes of one sample's targets as they travel."""
        return sum(prod(leaf.shape) * leaf.travels_as.itemsize for leaf in self._targets.leaves)

    def as_json(self) -> dict[str, dict[str, str]]:
        """Return what hub and body must agree on."""
        return {"inputs": self._inputs.as_json(), "targets": self._targets.as_json()}

    def check(self, batch: Batch) -> Batch:
        """Return the batch; InvalidInput unless all of it is like the first sample."""
        parts = (("inputs", self._inputs), ("targets", self._targets))
        for (what, own), found in zip(parts, batch, strict=True):
            if own.leaves_of(found) is None:
                raise InvalidInput(
                    self._name,
                    f"a batch has {what} {described(found)}, and the first sample {own.as_json()}",
                    hint=(
                        "samples must be of one structure, shape and type: pad or cut them in "
                        "the data set, or in the recipe's collate"
                    ),
                )
        return batch

    def parts(self, batch: Batch) -> Parts:
        """Return the targets of a batch that was checked, as parts of a message."""
        leaves = self._targets.leaves_of(batch.targets)
        assert leaves is not None
        return tuple(
            part_of(leaf.to(own.travels_as).contiguous())
            for leaf, own in zip(leaves, self._targets.leaves, strict=True)
        )

    def check_parts(self, parts: Parts, count: int) -> None:
        """Raise InvalidInput unless parts that came have the bytes of so many samples' targets."""
        for part, own in zip(parts, self._targets.leaves, strict=True):
            expected = count * prod(own.shape) * own.travels_as.itemsize
            if part.nbytes != expected:
                raise InvalidInput(
                    f"targets{own.name}",
                    f"{part.nbytes:,} bytes",
                    hint=f"{own.text} of each of {count} samples are {expected:,}",
                )

    def targets(self, buffers: Sequence[Tensor], count: int) -> Any:
        """Return the targets of so many samples, of parts that were checked and are on a device.

        Raises InvalidInput for a class number that there is not.
        """
        leaves = [
            buffer.view(own.travels_as).to(own.dtype).view(count, *own.shape)
            for buffer, own in zip(buffers, self._targets.leaves, strict=True)
        ]
        if self._num_classes is not None:
            # On a GPU a class that does not exist would abort the process.
            (labels,) = leaves
            if not bool(((labels >= 0) & (labels < self._num_classes)).all()):
                raise InvalidInput("targets", f"a label is none of the {self._num_classes} classes")
        return tree_unflatten(leaves, self._targets.tree)
