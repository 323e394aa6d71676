"""Hook and count the steps of a user's optimizers."""

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.core.errors import InvalidInput


class StepHooks:
    """Calls `before(optimizer)` and `after(optimizer)` around each optimizer step.

    Torch also calls the hooks in a nested step, such as a call of the base class's `step`; nested
    steps are ignored. A step that raises does not affect the next step.
    """

    def __init__(
        self,
        optimizers: Iterable[Optimizer],
        before: Callable[[Optimizer], None],
        after: Callable[[Optimizer], None],
    ) -> None:
        self._before, self._after = before, after
        self._depth = 0
        self._caller: FrameType | None = None  # frame of torch's wrapper of the outermost step
        self._handles: list[Any] = []
        for one in optimizers:
            self._handles.append(one.register_step_pre_hook(self._begin))
            self._handles.append(one.register_step_post_hook(self._end))

    def _begin(self, optimizer: Optimizer, *_: object) -> None:
        if not torch.compiler.is_compiling():  # a compiled step has no frame of torch's wrapper
            caller = sys._getframe(1)
            if self._caller is None or self._caller not in _callers_of(caller):
                self._depth, self._caller = 0, caller
        self._depth += 1
        if self._depth == 1:
            self._before(optimizer)

    def _end(self, optimizer: Optimizer, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._caller = None
            self._after(optimizer)

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


class InnerSteps:
    """Counts the inner steps of one or several optimizers.

    Several optimizers that step in turn make one inner step. If an optimizer steps twice before
    another has stepped, for example because a GradScaler skipped the other's step, the next inner
    step begins.

    Raises InvalidInput unless the optimizers train all trainable parameters of the model, and no
    others. A second step on the same gradients, or a step after parameters were added, raises
    InvalidInput.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | Sequence[Optimizer]) -> None:
        self.count = 0
        self.optimizers = _optimizers_of(optimizer)
        self._num_trained = _num_trained(model, self.optimizers)
        self._stepped: set[Optimizer] = set()
        # gradients of each optimizer's last step, with tensor versions
        self._gradients: dict[Optimizer, list[tuple[weakref.ref[Tensor], int]]] = {}
        self._is_complete = False  # whether an inner step has ended, and `on_step` must be called
        self._hooks: list[StepHooks] = []

    def watch(self) -> None:
        """Count steps from now on; the optimizers keep this object alive."""
        self._hooks.append(StepHooks(self.optimizers, _do_nothing, self._after))

    def call_after(self, on_step: Callable[[], None]) -> None:
        """Call `on_step` after each inner step, after hooks that were registered earlier."""

        def call(_: Optimizer) -> None:
            if self._is_complete:
                self._is_complete = False
                on_step()

        self._hooks.append(StepHooks(self.optimizers, _do_nothing, call))

    def remove(self) -> None:
        """Remove the hooks."""
        for one in self._hooks:
            one.remove()

    def _after(self, optimizer: Optimizer) -> None:
        # a GradScaler lets a fused optimizer run its step, which then changes nothing
        skipped = getattr(optimizer, "found_inf", None)
        if skipped is not None and skipped.item():
            return
        self._check(optimizer)
        if optimizer in self._stepped:
            self._complete()
        self._stepped.add(optimizer)
        if len(self._stepped) == len(self.optimizers):
            self._complete()

    def _complete(self) -> None:
        self._stepped.clear()
        self.count += 1
        self._is_complete = True

    def _check(self, optimizer: Optimizer) -> None:
        if len(_parameters_of(self.optimizers)) != self._num_trained:
            hint = "create LocalUpdates after adding all parameter groups"
            raise InvalidInput("optimizer", "has parameters added after LocalUpdates", hint=hint)
        self._check_gradients(optimizer)

    def _check_gradients(self, optimizer: Optimizer) -> None:
        """Raise InvalidInput if no gradient changed since this optimizer's last step."""
        gradients = [one.grad for one in _parameters_of([optimizer])]
        found = [(one, one._version) for one in gradients if one is not None]
        before = [(one(), version) for one, version in self._gradients.get(optimizer, [])]
        if found and len(found) == len(before):
            pairs = zip(found, before, strict=True)
            if all(one is other and own == last for (one, own), (other, last) in pairs):
                problem = "has stepped twice on the same gradients"
                raise InvalidInput("optimizer", problem, hint="step once per batch")
        self._gradients[optimizer] = [(weakref.ref(one), version) for one, version in found]


def _callers_of(frame: FrameType) -> Iterator[FrameType]:
    """Yield the calling frames, innermost first."""
    caller = frame.f_back
    while caller is not None:
        yield caller
        caller = caller.f_back


def _do_nothing(_: Optimizer) -> None:
    """Do nothing before a step."""


def _optimizers_of(given: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    """Return the optimizers to hook, without Accelerate's wrappers."""
    found = []
    for one in [given] if isinstance(given, Optimizer) else list(given):
        while isinstance(inner := getattr(one, "optimizer", None), Optimizer):
            one = inner
        if not isinstance(one, Optimizer):
            raise InvalidInput("optimizer", "must be a torch optimizer", got=type(one).__name__)
        found.append(one)
    if not found:
        raise InvalidInput("optimizer", "must not be empty")
    return found


def _parameters_of(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    return [one for own in optimizers for group in own.param_groups for one in group["params"]]


def _num_trained(model: nn.Module, optimizers: Sequence[Optimizer]) -> int:
    """Return the number of the optimizers' parameters.

    Raises InvalidInput if they are not the model's trainable parameters.
    """
    named = {one: name for name, one in model.named_parameters() if one.requires_grad}
    given = _parameters_of(optimizers)
    missing = [name for one, name in named.items() if one not in set(given)]
    if missing:
        hint = "freeze it by requires_grad_(False), or pass all optimizers as a list"
        raise InvalidInput("optimizer", f"does not train {missing[0]}", hint=hint)
    if any(one.requires_grad and one not in named for one in given):
        hint = "pass a module that contains all of them"
        raise InvalidInput("optimizer", "has parameters outside the model", hint=hint)
    return len(given)
