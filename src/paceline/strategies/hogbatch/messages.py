"""The messages between coordinator and workers (section V): ScheduleWork and ExecuteWork.

    coordinator   TrySpeed      ExecuteWork ...            Command.SAVE      Command.STOP
    worker     ()      SpeedTrial        (ScheduleWork, ...)         Command.SAVE

A worker reports several short batches in one tuple; an empty one says that it is ready. States and
traced spans are in the wire's file. Times are nanoseconds of CLOCK_MONOTONIC.
"""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from paceline.core.settings import TrainSettings
from paceline.links.shared_memory import SharedTensors
from paceline.strategies.hogbatch.config import WorkerSpec
from paceline.strategies.hogbatch.statistics import BatchResult

# The names of the tensors that all workers share beside the model.
INPUTS, TARGETS, ORDER, COMMITTED = "inputs", "targets", "order", "committed"


@dataclass(frozen=True)
class Training:
    """The training that all workers of a run have in common.

    Workers know the recipe by the settings, too. Where the samples are tensors, these are in the
    `data`, and `num_classes` are the recipe's.
    """

    settings: TrainSettings
    num_classes: int | None
    parameters: SharedTensors
    data: SharedTensors


@dataclass(frozen=True)
class ProcessSettings:
    """The settings of a worker process.

    `cores` are the processors that it is pinned to; none leaves it where it is. `depth` is the
    number of batches that it has in work at once.
    """

    number: int
    spec: WorkerSpec
    depth: int
    cores: tuple[int, ...]
    training: Training


class Command(Enum):
    """A command without fields: to end, or to write or read the worker's state in the file."""

    STOP = "stop"
    SAVE = "save"
    LOAD = "load"


class TrySpeed(NamedTuple):
    """A command to try batches of these sizes, each for about `seconds`, on a copy of the model."""

    sizes: tuple[int, ...]
    seconds: float


class ExecuteWork(NamedTuple):
    """A command to train on `size` samples from place `first` of the epoch's order.

    The learning rate is `rate` times that of the settings. `batch` is the number of the batch in
    the run.
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
    """A worker's request for work, with the result of a batch of `size` samples."""

    batch: int
    size: int
    result: BatchResult
