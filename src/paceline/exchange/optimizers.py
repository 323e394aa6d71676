"""Optimizer hooks that record a user's optimizer steps, or prevent steps with NaN gradients."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Literal, get_args

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from paceline.core.errors import NonFinite
from paceline.core.names import not_known
from paceline.core.plan import Kind
from paceline.exchange.readiness import weakly
from paceline.record.recorder import Recorder

Policy = Literal["raise", "skip"]


def _hook_steps(
    register: Callable[[Any], RemovableHandle], method: Callable[..., Any]
) -> RemovableHandle:
    """Register a bound method as a hook of all optimizers, without keeping its object alive."""
    handle = register(weakly(method))
    end = weakref.finalize(method.__self__, handle.remove)  # type: ignore[attr-defined] # bound method
    end.atexit = False  # not at interpreter exit, when torch's hook tables may be deleted already
    return handle


class StepRecorder:
    """Records the training steps of a user's loop: forward passes and optimizer steps."""

    def __init__(self, recorder: Recorder, module: nn.Module) -> None:
        self._recorder = recorder
        self._own = {id(p) for p in module.parameters()}
        self._updated = False
        self._handles = [
            _hook_steps(register_optimizer_step_pre_hook, self._before),
            _hook_steps(register_optimizer_step_post_hook, self._after),
        ]

    def begin_forward(self) -> None:
        """Record the start of a forward pass; after an optimizer step, also begin a new step."""
        self._recorder.end_phase()
        if self._updated:
            self._recorder.end_step()
            self._updated = False
        self._recorder.begin_phase(Kind.FORWARD)

    def _before(self, optimizer: Optimizer, *_: object) -> None:
        if self._updates(optimizer):
            self._recorder.end_phase()
            self._recorder.begin_phase(Kind.STEP)

    def _after(self, optimizer: Optimizer, *_: object) -> None:
        if self._updates(optimizer):
            self._recorder.end_phase()
            self._updated = True

    def _updates(self, optimizer: Optimizer) -> bool:
        # check only one parameter, because the hook runs in every optimizer step of the process
        first = optimizer.param_groups[0]["params"]
        return bool(first) and id(first[0]) in self._own

    def close(self) -> None:
        """Remove the hooks from the optimizers."""
        for handle in self._handles:
            handle.remove()


class NonFiniteGuard:
    """Prevents optimizer steps with NaN or infinite gradients, which codecs cannot represent.

    If a gradient is NaN or infinite on any rank, all gradients that are exchanged together with it
    become NaN on all ranks. A GradScaler then skips the step. Without a GradScaler,
    `optimizer.step()` raises NonFinite or, with policy "skip", changes nothing: no optimizer of the
    model takes this step.
    """

    def __init__(self, policy: Policy) -> None:
        check_policy(policy)
        self.num_nonfinite = 0
        self.num_skipped = 0
        self._policy = policy
        self._suspects = False
        self._parameters: dict[int, Tensor] = {}
        self._handle = _hook_steps(register_optimizer_step_pre_hook, self._before_step)

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Add parameters whose exchanged gradients are checked."""
        self._parameters |= {id(parameter): parameter for parameter in parameters}

    def found(self, num_nonfinite: int) -> None:
        """Count `num_nonfinite` NaN and infinite values, found on all ranks in an exchange."""
        self.num_nonfinite += num_nonfinite
        self._suspects |= num_nonfinite > 0

    def close(self) -> None:
        """Remove the hooks from the optimizers."""
        self._handle.remove()

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Check gradients before a step; with a closure, after each call of the closure."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            self._check(optimizer)
            return None

        def computed() -> Any:
            loss = closure()
            self._check(optimizer)
            return loss

        if "closure" in kwargs:
            return args, kwargs | {"closure": computed}
        return (args[0], computed, *args[2:]), kwargs

    def _check(self, optimizer: Optimizer) -> None:
        if not self._suspects:
            return
        own: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        # check the model's parameters, too: the optimizer's may be copies of them in another dtype
        is_nan = _any_nan(own)
        if not is_nan and not _any_nan(self._parameters.values()):
            self._suspects = False  # the user has cleared or replaced the NaN gradients
        elif is_nan and getattr(optimizer, "found_inf", None) is not None:
            return  # a GradScaler has set `found_inf`: the fused optimizer skips this step
        elif is_nan and self._policy == "raise":
            raise NonFinite(
                f"{self.num_nonfinite} gradient values were NaN or infinite, which codecs cannot "
                "represent; on_nonfinite='skip' skips such steps"
            )
        elif is_nan or any(id(parameter) in self._parameters for parameter in own):
            # Make this step change nothing. With policy "raise", keep other optimizers' NaN
            # gradients, so that their steps raise NonFinite.
            dropped = [*own, *(self._parameters.values() if self._policy == "skip" else ())]
            for parameter in dropped:
                parameter.grad = None
            if self._policy == "skip":
                self._suspects = False
                self.num_skipped += 1


def check_policy(policy: str) -> None:
    """Raise InvalidInput unless the policy for NaN gradients is "raise" or "skip"."""
    if policy not in get_args(Policy):
        raise not_known("on_nonfinite", policy, get_args(Policy))


def _any_nan(parameters: Iterable[Tensor]) -> bool:
    """Return whether any gradient's first value is NaN; an exchange spreads NaN to all values."""
    gradients = [parameter.grad for parameter in parameters]
    return any(one is not None and bool(one.flatten()[:1].isnan().any()) for one in gradients)
