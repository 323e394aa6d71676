"""What happens to a step whose gradients are not finite on some rank: the same on all ranks."""

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.core.errors import InvalidInput, NonFinite
from paceline.exchange.optimizers import before_updates

Policy = Literal["raise", "skip"]
_POLICIES = ("raise", "skip")


class NonFiniteGuard:
    """Keeps optimizers from a step whose gradients no codec could carry.

    Gradients exchanged together with a value that is not finite are NaN on all ranks. A GradScaler
    sees that, skips the step and lowers its scale. An optimizer that is about to use them raises
    NonFinite, or by policy "skip" finds no gradients at all and so changes nothing. Another one of
    the same model changes nothing either: a step is taken as a whole.
    """

    def __init__(self, policy: Policy) -> None:
        check_policy(policy)
        self.num_nonfinite = 0
        self.num_skipped = 0
        self._policy = policy
        self._suspects = False
        self._parameters: dict[int, Tensor] = {}
        self._handle = before_updates(self._before_update)

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

    def _before_update(self, optimizer: Optimizer) -> None:
        if not self._suspects:
            return
        own: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        is_void = _any_void(own)  # which copies of the parameters in another type may be, too
        if not is_void and not _any_void(self._parameters.values()):
            self._suspects = False  # the gradients are those of a later step
        elif is_void and getattr(optimizer, "found_inf", None) is not None:
            return  # a GradScaler has told a fused optimizer to look by itself
        elif is_void and self._policy == "raise":
            raise NonFinite(
                f"gradients: {self.num_nonfinite} values so far were NaN or infinite on some rank, "
                "and no codec carries these; on_nonfinite='skip' skips such steps"
            )
        elif is_void or any(id(parameter) in self._parameters for parameter in own):
            self._withdraw(own)

    def _withdraw(self, own: Iterable[Tensor]) -> None:
        """Leave an optimizer no gradients; by policy "raise" others still have to see theirs."""
        for parameter in own:
            parameter.grad = None
        if self._policy == "skip":
            self._suspects = False
            self.num_skipped += 1
            for parameter in self._parameters.values():
                parameter.grad = None


def check_policy(policy: str) -> None:
    """Raise InvalidInput if there is no such policy."""
    if policy not in _POLICIES:
        raise InvalidInput(f"on_nonfinite: {policy!r} is not known; choose one of {_POLICIES}")


def _any_void(parameters: Iterable[Tensor]) -> bool:
    return any(_is_void(parameter.grad) for parameter in parameters)


def _is_void(gradient: Tensor | None) -> bool:
    """Whether a gradient came with values that were not finite: then all of it is NaN."""
    return (
        gradient is not None and gradient.numel() > 0 and bool(torch.isnan(gradient.flatten()[0]))
    )
