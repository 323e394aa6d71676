"""What happens to a step whose gradients are not finite on some rank: the same on all ranks."""

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.core.errors import InvalidInput, NonFinite
from paceline.exchange.optimizers import before_steps

Policy = Literal["raise", "skip"]
_POLICIES = ("raise", "skip")


class NonFiniteGuard:
    """Keeps optimizers from a step whose gradients no codec could carry.

    Gradients exchanged together with a value that is not finite are NaN on all ranks. A GradScaler
    sees that, skips the step and lowers its scale. An optimizer that is about to use them raises
    NonFinite, or by policy "skip" finds no gradients at all and so changes nothing.
    """

    def __init__(self, policy: Policy) -> None:
        check_policy(policy)
        self.num_nonfinite = 0
        self.num_skipped = 0
        self._policy = policy
        self._suspects = False
        self._parameters: dict[int, Tensor] = {}
        self._handle = before_steps(self._before_step)

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Learn whose gradients are exchanged."""
        self._parameters |= {id(parameter): parameter for parameter in parameters}

    def found(self, num_nonfinite: int) -> None:
        """Learn how many values of all ranks were not finite; their gradients are NaN."""
        self.num_nonfinite += num_nonfinite
        self._suspects |= num_nonfinite > 0

    def close(self) -> None:
        """Let go of the optimizers."""
        self._handle.remove()

    def _before_step(self, _: Optimizer) -> None:
        if not self._suspects:
            return
        self._suspects = False
        if not any(_is_void(parameter.grad) for parameter in self._parameters.values()):
            return  # a GradScaler has been here, and the gradients are those of a later step
        if self._policy == "raise":
            raise NonFinite(
                f"gradients: {self.num_nonfinite} values so far were NaN or infinite on some rank, "
                "and no codec carries these; on_nonfinite='skip' skips such steps"
            )
        self.num_skipped += 1
        for parameter in self._parameters.values():
            parameter.grad = None


def check_policy(policy: str) -> None:
    """Raise InvalidInput if there is no such policy."""
    if policy not in _POLICIES:
        raise InvalidInput(f"on_nonfinite: {policy!r} is not known; choose one of {_POLICIES}")


def _is_void(gradient: Tensor | None) -> bool:
    """Whether a gradient came with values that were not finite: then all of it is NaN."""
    return (
        gradient is not None and gradient.numel() > 0 and bool(torch.isnan(gradient.flatten()[0]))
    )
