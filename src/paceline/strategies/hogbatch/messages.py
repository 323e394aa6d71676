"""The messages between coordinator and workers (Ma, Rusu et al. 2020, section V).

    coordinator   Command.TRY   ExecuteWork ...            Command.SAVE      Command.STOP
    worker     ()      SpeedTrial        (BatchResult, ...)         Command.SAVE

A worker requests work by reporting the results of completed batches; an empty tuple means that the
worker is ready. `Wire` passes states and traced spans in a shared file. Times are nanoseconds of
CLOCK_MONOTONIC.
"""

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

from paceline.core.settings import TrainSettings
from paceline.links.shared_memory import SharedTensors
from paceline.strategies.hogbatch.config import WorkerSpec

# Names of the tensors that are shared with all workers in addition to the model.
INPUTS, TARGETS, ORDER, COMMITTED = "inputs", "targets", "order", "committed"


class Training(NamedTuple):
    """Settings and shared memory of all workers of a run.

    `num_classes`: the recipe's number of classes. `parameters`: the model's parameters and buffers.
    `data`: the other shared tensors, including samples if the recipe has tensor samples.
    """

    settings: TrainSettings
    num_classes: int | None
    parameters: SharedTensors
    data: SharedTensors


class ProcessSettings(NamedTuple):
    """The settings of a worker process.

    `depth`: the number of batches that the worker overlaps. `cores`: the CPUs that it may use.
    """

    number: int
    spec: WorkerSpec
    depth: int
    cores: tuple[int, ...]
    training: Training


class Command(Enum):
    """A command without fields: stop, measure the speed, save or load the worker's state."""

    STOP = "stop"
    TRY = "try"
    SAVE = "save"
    LOAD = "load"


class SpeedTrial(NamedTuple):
    """A worker's speed trial; `seconds` maps each batch size to the measured seconds per batch."""

    number: int
    spec: WorkerSpec
    seconds: Mapping[int, float]

    @property
    def samples_per_s(self) -> float:
        """Samples per second with the largest batch size of the trial."""
        size = max(self.seconds)
        return size / self.seconds[size]


class ExecuteWork(NamedTuple):
    """A command to train on `size` samples, from position `first` of the epoch's sample order.

    `batch`: the batch's number in the run. `rate`: multiplies the settings' learning rate. `step`:
    the batch's number in the worker's trace; None if the batch is not traced.
    """

    batch: int = 0
    first: int = 0
    size: int = 0
    rate: float = 0.0
    step: int | None = None

    @property
    def places(self) -> range:
        """The positions of the samples in the epoch's sample order."""
        return range(self.first, self.first + self.size)


class BatchResult(NamedTuple):
    """The result of a batch; all times are nanoseconds of CLOCK_MONOTONIC.

    `loss`: the sum of the samples' losses; NaN if unknown. `started_ns`: when the worker began to
    read the model. `begun_ns`: when it began to compute. `stepped_ns`: when the optimizer step
    ended. `ended_ns`: when the shared model had the update.
    """

    loss: float = 0.0
    started_ns: int = 0
    begun_ns: int = 0
    stepped_ns: int = 0
    ended_ns: int = 0
