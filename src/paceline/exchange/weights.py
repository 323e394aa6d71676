"""Gradients in proportion to samples: ranks with unequal batches train as one process would.

Each rank's loss is the mean over its own n samples, and the exchange averages W ranks' gradients.
The mean over all N samples is that average if each rank's gradient is first scaled by n W / N. It
is scaled where it enters the module, at its outputs: that costs nothing, reaches each parameter
once, and leaves alone what a loss adds that no sample takes part in, such as a weight decay.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from paceline.core.errors import InvalidInput
from paceline.links.group import Group


class Count:
    """How many samples the ranks have in one forward pass, added up while the pass goes on."""

    def __init__(self, own: int, group: Group) -> None:
        self._own, self._group = own, group
        self._total = torch.tensor([own])
        self._work: dist.Work | None = None
        self._weight: float | None = None

    def begin(self) -> None:
        """Begin to ask the others, who must do so, too."""
        if self._work is None and self._group.world_size > 1:
            with self._group.naming_the_lost():
                self._work = dist.all_reduce(self._total, group=self._group.control, async_op=True)

    def weight(self) -> float:
        """Return what to scale this rank's gradients by; waits for the others' numbers."""
        if self._weight is None:
            self.begin()
            if self._work is not None:
                with self._group.naming_the_lost():
                    self._work.wait(timedelta(seconds=self._group.deadline_s))
            total = int(self._total)
            self._weight = self._own * self._group.world_size / total if total else 0.0
        return self._weight


def num_samples(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the rows of the first tensor among a module's arguments.

    InvalidInput if there is none that has rows.
    """
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor):
            if leaf.ndim:
                return len(leaf)
            break
    raise InvalidInput(
        "balance: the module's first tensor has no rows to count samples by; say how many there "
        "are with model.samples(n) before each forward pass"
    )


def scale_gradients(outputs: Any, weight: Callable[[], float]) -> None:
    """Have the gradients of these outputs scaled on their way into the module.

    `weight` is asked for in backward. InvalidInput if nothing of the outputs can be differentiated.
    """

    def scaled(gradient: Tensor) -> Tensor | None:
        factor = weight()
        if factor == 1:
            return None
        # What a loss makes of no samples may be no number.
        return gradient * factor if factor else torch.zeros_like(gradient)

    for leaf in differentiable(outputs):
        leaf.register_hook(scaled)


def differentiable(outputs: Any) -> list[Tensor]:
    """Return the tensors among a module's outputs that have gradients; InvalidInput without any."""
    leaves = [
        leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad
    ]
    if not leaves:
        raise InvalidInput(
            "balance: the module's outputs hold no tensor with a gradient to be weighted; return "
            "tensors, or tuples, lists and dictionaries of them"
        )
    return leaves
