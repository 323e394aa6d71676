"""State that a worker copies from a peer: optimizers, buffers and step count.

optimizer.step()   | pre-hook .......... post-hook |
StepLock           | held by the loop              | free: another thread may copy the state
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.checkpoints.json_values import Json
from paceline.checkpoints.state import load_optimizer_state, optimizer_state
from paceline.core.errors import WorkerLost
from paceline.exchange.inner_steps import StepHooks


@dataclass(frozen=True)
class InnerState:
    """A worker's inner state in host memory: `tensors` and plain `values` of each optimizer."""

    optimizers: list[dict[str, Json]]
    buffers: list[Tensor]
    num_steps: int

    @classmethod
    def of(cls, model: nn.Module, optimizers: Sequence[Optimizer], num_steps: int) -> Self:
        """Copy the state of a model's buffers and optimizers.

        Raises InvalidInput for an optimizer state that cannot be sent.
        """
        copies = []
        for one in optimizers:
            tensors, values = optimizer_state(one, model.named_parameters())
            copied = {name: _copied(tensor) for name, tensor in tensors.items()}
            copies.append({"tensors": copied, "values": values})
        return cls(copies, [_copied(one) for one in model.buffers()], num_steps)

    def load_into(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Load the optimizers' state; InvalidInput for other optimizers."""
        for one, state in zip(optimizers, self.optimizers, strict=True):
            load_optimizer_state(one, model.named_parameters(), **state)


class StepLock:
    """Prevents reading optimizer state during a step.

    A step that raises leaves it locked until the next step has ended.
    """

    def __init__(self, optimizers: Sequence[Optimizer], deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._is_in_step = False
        parameters = (
            own for one in optimizers for group in one.param_groups for own in group["params"]
        )
        self._accelerators = {one.device for one in parameters if one.device.type != "cpu"}
        self._hooks = StepHooks(optimizers, self._begin, self._end)

    def _begin(self, _: Optimizer) -> None:
        if not self._is_in_step:
            self._lock.acquire()  # readers hold it only while copying
        self._is_in_step = True

    def _end(self, _: Optimizer) -> None:
        self._is_in_step = False
        self._lock.release()

    def __enter__(self) -> None:
        """Wait for the end of a step; WorkerLost after the deadline."""
        if not self._lock.acquire(timeout=self._deadline_s):
            raise WorkerLost(f"no step of the optimizer has ended in {self._deadline_s:g} s")
        for device in self._accelerators:  # wait for the step's kernels
            torch.accelerator.synchronize(device)

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def close(self) -> None:
        """Remove the hooks."""
        self._hooks.remove()
        if self._is_in_step:
            self._lock.release()


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
