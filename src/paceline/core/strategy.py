"""What a strategy is: a record of its configuration, its plan and where its runner lies."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

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


class Calibrate(Protocol):
    """From what a small and a large exchange took to the machine on which they take that."""

    def __call__(self, machine: Machine, measured: Measurements, config: Any = None) -> Machine:
        """Return the machine of which only the two or more devices were known, one a worker.

        `config` is the one with which the exchanges were measured, and holds for plans with it
        alone; None stands for that of the strategy as it comes.
        """
        ...


@dataclass(frozen=True, slots=True)
class Strategy:
    """A way of training in parallel.

    `plan` takes what one worker does in a step, the machine, a `config` and a window.
    `run` names the module that does the real work, so that planning never imports torch: its
    `train` trains, and its `exchange` exchanges gradients alone, to be measured.
    """

    name: str
    config: type
    plan: Callable[[Workload, Machine, Any, Window], Plan]
    calibrate: Calibrate
    run: str
