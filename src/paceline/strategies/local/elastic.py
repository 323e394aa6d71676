"""The runner of a worker that comes and goes: nothing is measured, and nothing is planned."""

from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_model

from paceline.core.outcome import Outcome
from paceline.core.plan import Plan
from paceline.exchange.loop import train
from paceline.exchange.replicas import outcome_of
from paceline.exchange.session import TrainingSession
from paceline.exchange.setup import setup_for
from paceline.links.clock import clock_for
from paceline.record.recorder import Recorder
from paceline.strategies.local.config import Local
from paceline.strategies.local.learner import LocalModel, LocalReplica


class ElasticRunner:
    """Trains this worker's replica, which meets those of whoever is there."""

    def __init__(self, session: TrainingSession) -> None:
        assert session.elastic is not None
        self._session, self._elastic = session, session.elastic
        number, num_workers, _ = session.elastic
        # As one of so many ranks it takes its part of each batch; it meets the others by torchft.
        as_rank = replace(session.group, rank=number, world_size=num_workers)
        self.setup = setup_for(session.settings, as_rank, session.device)
        self.workload = self.setup.workload
        self.samples_per_step = self.setup.samples_per_step
        size = f"{self.workload.num_parameters:,} parameters in {len(self.workload.layers)} layers"
        self.about = (
            f"{session.settings.model}: {size}; {num_workers} elastic workers, which meet every "
            f"{session.config.sync_every} steps"
        )

    def measure(self) -> None:
        """Measure nothing: the others may be training already."""

    def train(self, config: Local) -> Outcome:
        """Train to the run's last step."""
        session, (number, _, manager) = self._session, self._elastic
        recorder = Recorder(clock_for(session.group.device), "", 0)
        torch.manual_seed(getattr(session.settings, "seed", 0) + number)
        replica = LocalReplica(self.setup.model)
        model = LocalModel(session, self.setup, recorder, replica, config, manager)
        begun = model.updates.num_steps
        replica.learner = model
        trained = train(session, self.setup, recorder, replica, model.learner)
        # Epochs that were over when it joined are not its own to tell of.
        epochs = trained.epochs[self._epoch_of(begun) :]
        trained = replace(trained, spans=(), epochs=epochs)
        return outcome_of(session, self.setup, trained, lambda window: Plan(()), config=config)

    def _epoch_of(self, num_steps: int) -> int:
        """Return the epoch in which so many steps of the run are done."""
        for number, count in enumerate(self.setup.epoch_steps):
            if num_steps < count:
                return number
            num_steps -= count
        return len(self.setup.epoch_steps)

    def save(self, path: Path) -> None:
        """Write the model as safetensors, where this worker speaks for the run."""
        if self._session.writes_files:
            save_model(self.setup.model, str(path))
