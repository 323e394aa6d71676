"""What a strategy is: a record of its configuration, its plan and where its runner lies."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.core.calibration import Measurements
from paceline.core.machine import Machine
from paceline.core.plan import Plan
from paceline.core.workload import Workload


@dataclass(frozen=True, slots=True)
class Window:
    """The number of steps that a plan covers."""

    num_steps: int

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise ValueError(f"a window has at least one step, not {self.num_steps}")


@dataclass(frozen=True, slots=True)
class Strategy:
    """A way of training in parallel.

    `plan` takes what one worker does in a step, the machine, a `config` and a window. `calibrate`
    takes a machine whose two or more devices are known, one for each worker, and what a small and a
    large exchange took there; it returns the machine on which exchanges take that by the plan.
    `run` names the module that does the real work, so that planning never imports torch: its
    `train` trains, and its `exchange` exchanges gradients alone, to be measured.
    """

    name: str
    config: type
    plan: Callable[[Workload, Machine, Any, Window], Plan]
    calibrate: Callable[[Machine, Measurements], Machine]
    run: str
