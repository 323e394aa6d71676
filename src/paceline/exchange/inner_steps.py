"""Count optimizer steps, and copy optimizer states and buffers while no step changes them."""

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.checkpoints.json_values import Json
from paceline.checkpoints.state import load_optimizer_state, optimizer_state
from paceline.core.errors import InvalidInput, WorkerLost


@dataclass(frozen=True)
class InnerState:
    """A copy of a worker's model buffers, optimizer states and step count, in host memory."""

    optimizers: list[dict[str, Json]]
    buffers: list[Tensor]
    num_steps: int


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


class InnerSteps:
    """Counts a worker's training steps by hooks on its optimizers.

    A training step consists of one step of each optimizer. A GradScaler may skip an optimizer's
    step, so a new training step also begins when an optimizer steps for the second time. Torch
    calls the hooks for nested steps, too, such as `super().step()`; these are not counted. A step
    that raises does not affect the count of later steps. During a step the optimizers are locked,
    so that another thread copies only complete states.

    Raises InvalidInput if the optimizers do not train exactly the trainable parameters of the
    model. Later, `optimizer.step()` raises InvalidInput for a second step on the same gradients,
    and after parameters were added to the optimizer.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | Sequence[Optimizer]) -> None:
        self.count = 0
        self._model, self.optimizers = model, _optimizers_of(optimizer)
        self._num_trained = _num_trained(model, self.optimizers)
        self._stepped: set[Optimizer] = set()
        # by optimizer: its gradient tensors at its last step, with their `_version` counters
        self._gradients: dict[Optimizer, list[tuple[weakref.ref[Tensor], int]]] = {}
        self._depth = 0  # number of `step` calls that are running, each nested in the previous
        # stack frame of torch's wrapper function around the outermost `step` call
        self._caller: FrameType | None = None
        # locked in a step; after a step that raised, until a later step has ended, because the
        # optimizers' states may be inconsistent
        self._lock = threading.Lock()
        self._handles: list[Any] = []

    def watch(self, on_step: Callable[[], None]) -> None:
        """Start to count steps, and call `on_step` after each step."""
        self._on_step = on_step
        for one in self.optimizers:
            self._handles.append(one.register_step_pre_hook(self._begin))
            self._handles.append(one.register_step_post_hook(self._end))

    def remove(self) -> None:
        """Remove the hooks from the optimizers, and unlock them."""
        for handle in self._handles:
            handle.remove()
        if self._depth > 0:  # a step has raised
            self._depth = 0
            self._lock.release()

    def state(self, deadline_s: float) -> InnerState:
        """Copy the state between two steps; may be called in another thread.

        Raises WorkerLost if a step takes longer than `deadline_s`, and InvalidInput if an
        optimizer's state cannot be sent to peers.
        """
        if not self._lock.acquire(timeout=deadline_s):
            raise WorkerLost(f"this worker's optimizer step took over {deadline_s:g} s")
        try:
            for device in {one.device for one in _parameters_of(self.optimizers)}:
                if device.type != "cpu":  # kernels of the last step may still run
                    torch.accelerator.synchronize(device)
            copies = []
            for optimizer in self.optimizers:
                tensors, values = optimizer_state(optimizer, self._model.named_parameters())
                copied = {name: _copied(tensor) for name, tensor in tensors.items()}
                copies.append({"tensors": copied, "values": values})
            return InnerState(copies, [_copied(one) for one in self._model.buffers()], self.count)
        finally:
            self._lock.release()

    def load(self, state: InnerState) -> None:
        """Load optimizer states and step count, not the buffers; InvalidInput if a state is unfit."""
        for optimizer, saved in zip(self.optimizers, state.optimizers, strict=True):
            load_optimizer_state(optimizer, self._model.named_parameters(), **saved)
        self.count = state.num_steps

    def _begin(self, _: Optimizer, *__: object) -> None:
        is_locked = self._depth > 0  # by an outer step, or by an earlier step that raised
        if not torch.compiler.is_compiling():  # when compiled, torch's wrapper has no stack frame
            caller = sys._getframe(1)
            if self._caller is None or self._caller not in _callers_of(caller):
                self._depth, self._caller = 0, caller
        self._depth += 1
        if not is_locked:
            self._lock.acquire()

    def _end(self, optimizer: Optimizer, *_: object) -> None:
        self._depth -= 1
        if self._depth:
            return
        self._caller = None
        before = self.count
        try:
            self._add(optimizer)
        finally:  # unlock only after counting, because `state` copies the count, too
            self._lock.release()
        if self.count > before:
            self._on_step()

    def _add(self, optimizer: Optimizer) -> None:
        # do not count steps that GradScaler skips: it calls fused optimizers with `found_inf` set
        skipped = getattr(optimizer, "found_inf", None)
        if skipped is not None and skipped.item():
            return
        if len(_parameters_of(self.optimizers)) != self._num_trained:
            hint = "add all parameter groups before you create LocalUpdates"
            problem = "has parameters that were added after LocalUpdates was created"
            raise InvalidInput("optimizer", problem, hint=hint)
        self._check_gradients(optimizer)
        if optimizer in self._stepped:
            self._complete()
        self._stepped.add(optimizer)
        if len(self._stepped) == len(self.optimizers):
            self._complete()

    def _complete(self) -> None:
        self._stepped.clear()
        self.count += 1

    def _check_gradients(self, optimizer: Optimizer) -> None:
        """Raise InvalidInput if no gradient of `optimizer` has changed since its last step."""
        gradients = [one.grad for one in _parameters_of([optimizer])]
        found = [(one, one._version) for one in gradients if one is not None]
        before = [(one(), version) for one, version in self._gradients.get(optimizer, [])]
        if found and len(found) == len(before):
            pairs = zip(found, before, strict=True)
            if all(one is other and own == last for (one, own), (other, last) in pairs):
                problem = "has taken two steps with the same gradients"
                raise InvalidInput("optimizer", problem, hint="call step once per batch")
        self._gradients[optimizer] = [(weakref.ref(one), version) for one, version in found]


def _callers_of(frame: FrameType) -> Iterator[FrameType]:
    """Yield the stack frames that have called `frame`, innermost first."""
    caller = frame.f_back
    while caller is not None:
        yield caller
        caller = caller.f_back


def _optimizers_of(given: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    """Return the optimizers as a list, unwrapped from Accelerate's AcceleratedOptimizer."""
    found = []
    for one in [given] if isinstance(given, Optimizer) else list(given):
        while isinstance(inner := getattr(one, "optimizer", None), Optimizer):
            one = inner
        if not isinstance(one, Optimizer):
            raise InvalidInput("optimizer", "must be a torch optimizer", got=type(one).__name__)
        found.append(one)
    if not found:
        raise InvalidInput("optimizer", "must not be an empty list")
    return found


def _parameters_of(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    return [one for own in optimizers for group in own.param_groups for one in group["params"]]


def _num_trained(model: nn.Module, optimizers: Sequence[Optimizer]) -> int:
    """Count the optimizers' parameters; InvalidInput unless they are the model's trainable ones."""
    named = {one: name for name, one in model.named_parameters() if one.requires_grad}
    given = _parameters_of(optimizers)
    missing = [name for one, name in named.items() if one not in set(given)]
    if missing:
        hint = "freeze it by requires_grad_(False), or pass all optimizers as a list"
        raise InvalidInput("optimizer", f"does not train parameter {missing[0]}", hint=hint)
    if any(one.requires_grad and one not in named for one in given):
        hint = "pass a model that contains all parameters of the optimizer"
        raise InvalidInput("optimizer", "has parameters outside the model", hint=hint)
    return len(given)
