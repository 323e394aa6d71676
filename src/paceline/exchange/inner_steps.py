"""Count and lock optimizer steps, and copy optimizer states and buffers between steps."""

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
    """Locks the state of optimizers during each step.

    If a step raises, the state may be inconsistent, and stays locked until a later step has ended.
    """

    def __init__(self, optimizers: Iterable[Optimizer], deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._is_in_step = False
        devices = {one.device for one in _parameters_of(optimizers)}
        self._accelerators = [one for one in devices if one.type != "cpu"]

    def begin_step(self) -> None:
        """Lock the state, after waiting for another thread that copies it."""
        if not self._is_in_step:
            self._lock.acquire()
        self._is_in_step = True

    def end_step(self) -> None:
        """Unlock the state, if `begin_step` has locked it."""
        if self._is_in_step:
            self._is_in_step = False
            self._lock.release()

    def __enter__(self) -> None:
        """Lock the state between steps; WorkerLost if a step lasts longer than the deadline."""
        if not self._lock.acquire(timeout=self._deadline_s):
            raise WorkerLost(f"an optimizer step took longer than {self._deadline_s:g} s")
        for device in self._accelerators:  # wait for the step's kernels
            torch.accelerator.synchronize(device)

    def __exit__(self, *_: object) -> None:
        self._lock.release()


@dataclass(frozen=True)
class InnerState:
    """A copy of a worker's buffers and optimizer states, in host memory."""

    optimizers: list[dict[str, Json]]
    buffers: list[Tensor]
    num_steps: int

    @classmethod
    def of(cls, model: nn.Module, optimizers: Sequence[Optimizer], num_steps: int) -> Self:
        """Copy the state; InvalidInput for an optimizer state that cannot be sent."""
        copies = []
        for one in optimizers:
            tensors, values = optimizer_state(one, model.named_parameters())
            copied = {name: _copied(tensor) for name, tensor in tensors.items()}
            copies.append({"tensors": copied, "values": values})
        return cls(copies, [_copied(one) for one in model.buffers()], num_steps)

    def load_into(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Load the saved states into `optimizers`; InvalidInput for a state that does not fit."""
        for one, state in zip(optimizers, self.optimizers, strict=True):
            load_optimizer_state(one, model.named_parameters(), **state)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


class InnerSteps:
    """Counts a worker's training steps by hooks on its optimizers.

    A training step consists of one step of each optimizer. If an optimizer steps for the second
    time while another optimizer has not stepped, for example because a GradScaler skipped the
    latter, a new training step begins. Torch calls the hooks also for a nested step, such as
    `super().step()`; nested steps are ignored. A step that raises does not affect the next step.

    Raises InvalidInput unless the optimizers train exactly the trainable parameters of the model.
    A second step on the same gradients, or a step after parameters were added, also raises
    InvalidInput.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | Sequence[Optimizer]) -> None:
        self.count = 0
        self.optimizers = _optimizers_of(optimizer)
        self._num_trained = _num_trained(model, self.optimizers)
        self._stepped: set[Optimizer] = set()
        # gradients of each optimizer's last step, with tensor versions
        self._gradients: dict[Optimizer, list[tuple[weakref.ref[Tensor], int]]] = {}
        self._depth = 0  # number of nested steps
        # stack frame of torch's wrapper around the outermost step
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
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        if self._lock is not None:
            self._lock.end_step()

    def _begin(self, _: Optimizer, *__: object) -> None:
        if not torch.compiler.is_compiling():  # in a compiled step, torch's wrapper has no frame
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
        # unlock after counting, because a peer copies the state together with the count
        if self._lock is not None:
            self._lock.end_step()
        if self.count > before:
            self._on_step()

    def _add(self, optimizer: Optimizer) -> None:
        # a GradScaler calls a fused optimizer even for a skipped step, which changes nothing
        skipped = getattr(optimizer, "found_inf", None)
        if skipped is not None and skipped.item():
            return
        if len(_parameters_of(self.optimizers)) != self._num_trained:
            hint = "create LocalUpdates after adding all parameter groups"
            raise InvalidInput("optimizer", "has parameters added after LocalUpdates", hint=hint)
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
    """Return how many parameters are trained; InvalidInput unless they are those of the model."""
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
