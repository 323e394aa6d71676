"""Batches of no samples, for ranks that have none in a step."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import default_collate


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
        return tree_map(_no_rows, self._collate([self._samples[0]]))


def _no_rows(leaf: Any) -> Any:
    return leaf[:0] if isinstance(leaf, Tensor) and leaf.ndim else leaf
