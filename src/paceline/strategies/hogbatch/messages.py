"""The messages between coordinator and workers (section V): ScheduleWork and ExecuteWork.

    coordinator   TrySpeed      ExecuteWork ...            Command.SAVE      Command.STOP
    worker     ()      SpeedTrial        (ScheduleWork, ...)         Command.SAVE

A worker reports several short batches in one tuple; an empty tuple means that it is ready. The
wire's file carries states and traced spans. Times are nanoseconds of CLOCK_MONOTONIC.
"""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from paceline.core.settings import TrainSettings
from paceline.links.shared_memory import SharedTensors
from paceline.strategies.hogbatch.config import WorkerSpec
from paceline.strategies.hogbatch.statistics import BatchResult

# The names of the tensors that all workers share in addition to the model.
INPUTS, TARGETS, ORDER, COMMITTED = "inputs", "targets", "order", "committed"


@dataclass(frozen=True)
class Training:
    """Settings and shared memory of all workers of a run.

    `data` has the samples if they are tensors; `num_classes` is the recipe's.
    """

    settings: TrainSettings
    num_classes: int | None
    parameters: SharedTensors
    data: SharedTensors


@dataclass(frozen=True)
class ProcessSettings:
    """The settings of a worker process.

    `depth`: its number of batches in work. `cores`: the processors that it is pinned to, if any.
    """

    number: int
    spec: WorkerSpec
    depth: int
    cores: tuple[int, ...]
    training: Training


class Command(Enum):
    """A command without fields: to stop, or to save or load the worker's state."""

    STOP = "stop"
    SAVE = "save"
    LOAD = "load"


class TrySpeed(NamedTuple):
    """A command to time batches of these sizes, each for `seconds`, on a copy of the model."""

    sizes: tuple[int, ...]
    seconds: float


class ExecuteWork(NamedTuple):
    """A command to train on `size` samples from place `first` of the epoch's order.

    `batch`: the batch's number in the run. `rate`: a factor of the settings' learning rate.
    """

    batch: int = 0
    first: int = 0
    size: int = 0
    rate: float = 0.0
    traced: bool = False

    @property
    def places(self) -> range:
        """The places of the samples in the epoch's order."""
        return range(self.first, self.first + self.size)


class ScheduleWork(NamedTuple):
    """A worker's request for work, with the result of its last batch."""

    batch: int
    size: int
    result: BatchResult
