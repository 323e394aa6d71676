"""The phases of steps in a loop that is the user's own."""

import torch
from torch import nn

from paceline.core.plan import Kind
from paceline.exchange.optimizers import after_steps, before_steps
from paceline.record.recorder import Recorder


class Steps:
    """Where steps begin and end in a loop that is not ours: seen from forward and the optimizer."""

    def __init__(self, recorder: Recorder, module: nn.Module) -> None:
        self._recorder = recorder
        self._own = {id(p) for p in module.parameters()}
        self._updated = False
        self._handles = [before_steps(self._before), after_steps(self._after)]

    def begin_forward(self) -> None:
        """Begin a step, if this is the first forward pass after an update."""
        self._recorder.end_phase()
        if self._updated:
            self._recorder.end_step()
            self._updated = False
        self._recorder.begin_phase(Kind.FORWARD)

    def _before(self, optimizer: torch.optim.Optimizer) -> None:
        if self._updates(optimizer):
            self._recorder.end_phase()
            self._recorder.begin_phase(Kind.STEP)

    def _after(self, optimizer: torch.optim.Optimizer) -> None:
        if self._updates(optimizer):
            self._recorder.end_phase()
            self._updated = True

    def _updates(self, optimizer: torch.optim.Optimizer) -> bool:
        first = optimizer.param_groups[0]["params"]
        return bool(first) and id(first[0]) in self._own

    def close(self) -> None:
        """Let go of the optimizers."""
        for handle in self._handles:
            handle.remove()
