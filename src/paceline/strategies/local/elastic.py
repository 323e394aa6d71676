"""Train an elastic worker, which may join and leave at any time, without profile and plan."""

from bisect import bisect
from dataclasses import replace
from itertools import accumulate
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
    """Trains this worker's replica, and averages with the workers that are present."""

    def __init__(self, session: TrainingSession) -> None:
        assert session.elastic is not None
        self._session, self._elastic = session, session.elastic
        number, num_workers, _ = session.elastic
        # The rank selects its share of each batch; torchft connects the workers.
        as_rank = replace(session.group, rank=number, world_size=num_workers)
        self.setup = setup_for(session.settings, as_rank, session.device)
        self.workload = self.setup.workload
        self.samples_per_step = self.setup.samples_per_step
        size = f"{self.workload.num_parameters:,} parameters in {len(self.workload.layers)} layers"
        self.about = (
            f"{session.settings.model}: {size}; {num_workers} elastic workers, rounds of "
            f"{session.config.sync_every} steps"
        )

    def measure(self) -> None:
        """Do nothing, because the other workers may be training already."""

    def train(self, config: Local) -> Outcome:
        """Train to the run's last step."""
        session, (number, _, manager) = self._session, self._elastic
        recorder = Recorder(clock_for(session.group.device), "", 0)
        torch.manual_seed(getattr(session.settings, "seed", 0) + number)
        replica = LocalReplica(self.setup.model)
        model = LocalModel(session, self.setup, recorder, replica, config, manager)
        # Do not report epochs that were over when it joined.
        joined = bisect(list(accumulate(self.setup.epoch_steps)), model.updates.num_steps)
        replica.learner = model
        trained = train(session, self.setup, recorder, replica, model.learner)
        trained = replace(trained, spans=(), epochs=trained.epochs[joined:])
        return outcome_of(session, self.setup, trained, lambda window: Plan(()), config=config)

    def save(self, path: Path) -> None:
        """Write the model as safetensors, if this worker reports for the run."""
        if self._session.speaks:
            save_model(self.setup.model, str(path))
