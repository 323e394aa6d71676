"""Describe a training or rehearsal in this process, and the interface of a strategy's runner.

    with start(session) as runner:         # `start` from `strategy.runner()`
        calibrated = runner.measure()      # machine and layer times, to predict steps by a plan
        outcome = runner.train(config)     # trains, or rehearses in a rehearsal session
        runner.save(path)

A rehearsal times steps without learning. If `session.device` is set, the model's layers do
not compute, but sleep as long as they would compute on this device.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, SupportsFloat

from paceline.core.cost import PacedDevice
from paceline.core.outcome import Epoch, Evaluation, Outcome
from paceline.core.settings import RehearseSettings, TrainSettings
from paceline.core.strategy import PricedMachine, Strategy
from paceline.core.timeline import Origin
from paceline.core.workload import Workload
from paceline.exchange.checkpoints import State
from paceline.links.group import Group

_STATUS_S = 0.5  # minimum time between two calls of `Progress.status`


class ElasticWorker(NamedTuple):
    """A worker of a group that may change: this process's number and its torchft manager."""

    number: int
    num_workers: int
    manager: Any


class Progress:
    """Receives the progress of a run, to show it; this base class ignores it."""

    def begin(self, total: int, unit: str) -> None:
        """Begin a run of `total` steps or samples; `unit`: "steps" or "samples"."""

    def advance(self, count: int = 1) -> None:
        """Add `count` finished steps or samples (see `begin`)."""

    def epoch(self, epoch: Epoch, score: str) -> None:
        """Report a finished epoch; `score`: name of the epoch's score."""

    def evaluation(self, found: Evaluation, score: str) -> None:
        """Report a test within an epoch; `score`: name of the test's score."""

    def status(self, text: str) -> None:
        """Show a line of text about the current loss and throughput."""


class Status:
    """Advances a run's progress, and shows loss and throughput twice a second.

    `before`: returns a text to show before the loss.
    """

    def __init__(self, progress: Progress, tokens_per_sample: int | None) -> None:
        self._progress, self._tokens = progress, tokens_per_sample
        self.before: Callable[[], str] = str
        self.begin()

    def begin(self) -> None:
        """Start to count samples and seconds, from which `add` computes the throughput."""
        self._since_s, self._num_samples = time.monotonic(), 0.0

    def add(self, num_samples: float, loss: SupportsFloat, advances: int = 1) -> None:
        """Count the samples of a step, and advance the progress by `advances` units.

        `loss` is only read when it is shown, because reading waits for the GPU.
        """
        self._progress.advance(advances)
        self._num_samples += num_samples
        took_s = time.monotonic() - self._since_s
        if took_s < _STATUS_S:
            return
        rate = self._num_samples / took_s
        tokens = f", {rate * self._tokens:,.0f} tokens/s" if self._tokens else ""
        shown = f"loss {float(loss):.4g}, {rate:,.0f} samples/s{tokens}"
        self._progress.status(self.before() + shown)
        self.begin()


@dataclass(frozen=True)
class TrainingSession:
    """A training run or a rehearsal, as one process of it sees it.

    `config`: the strategy's options. `group`: the ranks of a synchronous strategy; with other
    strategies, this process alone. `device`: the device that a rehearsal emulates. `resumed`: the
    checkpoint's state to resume from. `elastic`: this worker, if torchft connects the workers.
    """

    settings: TrainSettings | RehearseSettings
    strategy: Strategy
    config: Any
    run_id: str
    group: Group
    progress: Progress
    device: PacedDevice | None = None
    resumed: State | None = None
    elastic: ElasticWorker | None = None

    @property
    def writes_files(self) -> bool:
        """Whether this process writes the run's files and shows progress."""
        return self.group.rank == 0 and (self.elastic is None or self.elastic.number == 0)

    @property
    def folder(self) -> Path:
        """The run's folder, in the folder given by `--output`."""
        return self.settings.output / self.run_id

    @property
    def is_rehearsal(self) -> bool:
        """Whether this is a rehearsal, which times steps but learns nothing."""
        return isinstance(self.settings, RehearseSettings)

    @property
    def origin(self) -> Origin:
        """The origin to write into recorded timelines: REHEARSED in a rehearsal, else MEASURED."""
        return Origin.REHEARSED if self.is_rehearsal else Origin.MEASURED


class Runner(Protocol):
    """Runs a session in this process by a strategy; all methods are collective."""

    @property
    def workload(self) -> Workload:
        """The layers and costs of one worker's part of a step."""

    @property
    def samples_per_step(self) -> float:
        """Number of samples in a step of all workers together, as a mean over steps."""

    @property
    def about(self) -> str:
        """A line of text about the model and the workers, for the user."""

    def measure(self) -> PricedMachine | None:
        """Time layers and exchanges to predict steps; None if the settings request no profile."""

    def train(self, config: Any) -> Outcome:
        """Train or rehearse with the session's `config`, after each "auto" got a value."""

    def save(self, path: Path) -> None:
        """Write the trained model to `path` in safetensors format, by a single process."""
