"""Count optimizer steps, and copy optimizer states and buffers while no step changes them."""

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.checkpoints.json_values import Json
from paceline.checkpoints.state import load_optimizer_state, optimizer_state
from paceline.core.errors import InvalidInput, WorkerLost


class StepLock:
    """Locks optimizers during each step, so that another thread copies only complete states.

    The other thread uses `with lock`. If a step raises, the state may be inconsistent: it stays
    locked until a later step has ended. `deadline_s`: longest wait of the other thread.
    """

    def __init__(self, optimizers: Iterable[Optimizer], deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._is_in_step = False
        devices = {one.device for one in _parameters_of(optimizers)}
        self._accelerators = [one for one in devices if one.type != "cpu"]

    def begin_step(self) -> None:
        """Lock the optimizers for a step; if another thread is copying them, wait."""
        if not self._is_in_step:
            self._lock.acquire()
        self._is_in_step = True

    def end_step(self) -> None:
        """Unlock the optimizers, if `begin_step` has locked them."""
        if self._is_in_step:
            self._is_in_step = False
            self._lock.release()

    def __enter__(self) -> None:
        """Wait for the end of a step, and lock the optimizers; WorkerLost after `deadline_s`."""
        if not self._lock.acquire(timeout=self._deadline_s):
            raise WorkerLost(f"this worker's optimizer step took over {self._deadline_s:g} s")
        for device in self._accelerators:  # kernels of the step may still run
            torch.accelerator.synchronize(device)

    def __exit__(self, *_: object) -> None:
        self._lock.release()


@dataclass(frozen=True)
class InnerState:
    """A copy of a worker's model buffers, optimizer states and step count, in host memory."""

    optimizers: list[dict[str, Json]]
    buffers: list[Tensor]
    num_steps: int

    @classmethod
    def of(cls, model: nn.Module, optimizers: Sequence[Optimizer], num_steps: int) -> Self:
        """Copy the state; raises InvalidInput if an optimizer's state cannot be sent to peers."""
        copies = []
        for one in optimizers:
            tensors, values = optimizer_state(one, model.named_parameters())
            copied = {name: _copied(tensor) for name, tensor in tensors.items()}
            copies.append({"tensors": copied, "values": values})
        return cls(copies, [_copied(one) for one in model.buffers()], num_steps)

    def load_into(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Load the optimizer states, not the buffers; InvalidInput if a state does not fit."""
        for one, state in zip(optimizers, self.optimizers, strict=True):
            load_optimizer_state(one, model.named_parameters(), **state)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


class InnerSteps:
    """Counts a worker's training steps by hooks on its optimizers.

    A training step consists of one step of each optimizer. A GradScaler may skip an optimizer's
    step, so a new training step also begins when an optimizer steps for the second time. Torch
    calls the hooks for nested steps, too, such as `super().step()`; these are not counted. A step
    that raises does not affect the count of later steps.

    Raises InvalidInput if the optimizers do not train exactly the trainable parameters of the
    model. Later, `optimizer.step()` raises InvalidInput for a second step on the same gradients,
    and after parameters were added to the optimizer.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | Sequence[Optimizer]) -> None:
        self.count = 0
        self.optimizers = _optimizers_of(optimizer)
        self._num_trained = _num_trained(model, self.optimizers)
        self._stepped: set[Optimizer] = set()
        # by optimizer: its gradient tensors at its last step, with their `_version` counters
        self._gradients: dict[Optimizer, list[tuple[weakref.ref[Tensor], int]]] = {}
        self._depth = 0  # number of `step` calls that are running, each nested in the previous
        # stack frame of torch's wrapper function around the outermost `step` call
        self._caller: FrameType | None = None
        self._lock: StepLock | None = None
        self._handles: list[Any] = []

    def watch(self, on_step: Callable[[], None], lock: StepLock | None = None) -> None:
        """Start to count steps; hold `lock` during each step, and call `on_step` after it."""
        self._on_step, self._lock = on_step, lock
        for one in self.optimizers:
            self._handles.append(one.register_step_pre_hook(self._begin))
            self._handles.append(one.register_step_post_hook(self._end))

    def remove(self) -> None:
        """Remove the hooks from the optimizers, and unlock them."""
        for handle in self._handles:
            handle.remove()
        if self._lock is not None:
            self._lock.end_step()

    def _begin(self, _: Optimizer, *__: object) -> None:
        if not torch.compiler.is_compiling():  # when compiled, torch's wrapper has no stack frame
            caller = sys._getframe(1)
            if self._caller is None or self._caller not in _callers_of(caller):
                self._depth, self._caller = 0, caller
        self._depth += 1
        if self._depth == 1 and self._lock is not None:
            self._lock.begin_step()

    def _end(self, optimizer: Optimizer, *_: object) -> None:
        self._depth -= 1
        if self._depth:
            return
        self._caller = None
        before = self.count
        self._add(optimizer)
        # unlock only after counting, because another thread copies the state with this count
        if self._lock is not None:
            self._lock.end_step()
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
