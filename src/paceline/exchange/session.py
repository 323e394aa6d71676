"""A session: what is to be trained, with what strategy, in this process; and what trains it.

    with start(session) as runner:         # `start` is that of `strategy.runner()`
        calibrated = runner.measure()      # how fast this machine is, for the plan
        outcome = runner.train(config)     # or rehearses: the runner is the same
        runner.save(path)

A rehearsal differs by `session.device` alone, whose paced layers take the place of the model's.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from paceline.core.cost import PacedDevice
from paceline.core.outcome import Epoch, Evaluation, Outcome
from paceline.core.settings import RehearseSettings, TrainSettings
from paceline.core.strategy import PricedMachine, Strategy
from paceline.core.timeline import Origin
from paceline.core.workload import Workload
from paceline.exchange.checkpoints import State
from paceline.links.group import Group


class ElasticWorker(NamedTuple):
    """This process as one of the workers that come and go: its number, and its manager."""

    number: int
    num_workers: int
    manager: Any


class Progress:
    """Receives the progress of a run: a bar in a terminal, a test. This one shows nothing."""

    def begin(self, total: int, unit: str) -> None:
        """Begin to count so many "steps" or "samples"."""

    def advance(self, count: int = 1) -> None:
        """Count steps or samples."""

    def epoch(self, epoch: Epoch, score: str) -> None:
        """Report an epoch that is over, and the name of its score."""

    def evaluation(self, found: Evaluation, score: str) -> None:
        """Report a test within an epoch, and the name of its score."""

    def status(self, text: str) -> None:
        """Show how fast the run is at the moment."""


@dataclass(frozen=True)
class TrainingSession:
    """A training or a rehearsal in this process.

    `config` is the strategy's configuration. `group`: the ranks that go through the run together;
    a hub or a coordinator is alone in its group, and starts its workers itself, and so is a worker
    that is `elastic`. `device`: for a rehearsal whose layers are paced. `resumed`: the state that
    the run goes on from.
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
    def speaks(self) -> bool:
        """True for the process that writes the run's files and shows its progress."""
        return self.group.rank == 0 and (self.elastic is None or self.elastic.number == 0)

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return self.settings.output / self.run_id

    @property
    def is_rehearsal(self) -> bool:
        """True if nothing is learnt, and layers only take time."""
        return isinstance(self.settings, RehearseSettings)

    @property
    def origin(self) -> Origin:
        """The origin of the timelines that are recorded."""
        return Origin.REHEARSED if self.is_rehearsal else Origin.MEASURED


class Runner(Protocol):
    """A strategy's part of a session in this process. All ranks call each method together."""

    @property
    def workload(self) -> Workload:
        """Describes one worker's part of a step."""

    @property
    def samples_per_step(self) -> float:
        """The samples of a step over all workers, on average over an epoch."""

    @property
    def about(self) -> str:
        """Says in one line what is trained, and by whom."""

    def measure(self) -> PricedMachine | None:
        """Measure devices and exchanges before the first step; None if that was not asked for."""

    def train(self, config: Any) -> Outcome:
        """Train, or rehearse, with this configuration, which may name more than the session's."""

    def save(self, path: Path) -> None:
        """Write the trained model as safetensors, on the process that speaks for the run."""


Start = Callable[[TrainingSession], AbstractContextManager[Runner]]
