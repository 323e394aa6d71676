"""Run strategy subbatch: train this rank's part of a model, or rehearse with sleeping layers."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import repeat
from pathlib import Path

import torch

from paceline.core.balance import evenly
from paceline.core.outcome import Outcome, SplitHead, Traffic
from paceline.core.settings import RehearseSettings, TrainSettings
from paceline.core.strategy import PricedMachine
from paceline.exchange import loop
from paceline.exchange import setup as setups
from paceline.exchange.learner import Learner
from paceline.exchange.profile import with_idle_cores
from paceline.exchange.replicas import about, outcome_of
from paceline.exchange.session import TrainingSession
from paceline.exchange.step import Share
from paceline.links.clock import clock_for
from paceline.measure.this_machine import this_machine
from paceline.record.recorder import Recorder
from paceline.strategies.subbatch import build
from paceline.strategies.subbatch.config import SubBatch
from paceline.strategies.subbatch.evaluation import evaluate
from paceline.strategies.subbatch.paced import paced_model, paced_optimizer
from paceline.strategies.subbatch.plan import plan
from paceline.strategies.subbatch.profile import ANY_SPEED, planned_nbytes, profile
from paceline.strategies.subbatch.state import save
from paceline.strategies.subbatch.trainer import SplitModel, SplitTrainer
from paceline.training.recipes.named import recipe_of, tried_with, workload_of

_PACED_COPIES = 3  # tensors counted per parameter in a rehearsal: value, gradient, momentum


@contextmanager
def start(session: TrainingSession) -> Iterator["SplitRunner"]:
    """Yield this rank's runner; raise InvalidInput if model, data and workers do not fit."""
    setups.check_world_size(session.settings.workers, session.group)
    yield SplitRunner(session, *(_paced(session) if session.is_rehearsal else _real(session)))


class SplitRunner:
    """Trains or rehearses this rank's part of a model."""

    def __init__(
        self, session: TrainingSession, model: SplitModel, trainee: setups.TrainingSetup
    ) -> None:
        self._session, self._model, self._trainee = session, model, trainee
        self._machine = this_machine(session.group, [ANY_SPEED] * session.group.world_size)
        self.workload = trainee.workload
        self.samples_per_step = trainee.samples_per_step
        self.about = about(session, trainee.workload)

    def measure(self) -> PricedMachine:
        """Measure the parts of a step separately; return a machine and a cost model."""
        session, seconds = self._session, self._session.settings.profile_s
        found = profile(self._model, self._trainee, session.config, session.group, seconds)
        self._machine = with_idle_cores(found.machine) if session.is_rehearsal else found.machine
        return PricedMachine(self._machine, found.cost)

    def train(self, config: SubBatch) -> Outcome:
        """Train or rehearse with this configuration."""
        session, group, trainee = self._session, self._session.group, self._trainee
        device = self._machine.devices[group.rank].name
        recorder = Recorder(clock_for(group.device), device, group.rank)
        seed = getattr(session.settings, "seed", 0)
        # Seed again, so that training does not depend on the profile. Each rank has another seed,
        # because dropout in the body needs different masks on each rank.
        torch.manual_seed(seed + group.rank)
        trainer = SplitTrainer(
            *(self._model, config, group, recorder, trainee.optimizer, seed),
            learning=trainee.learning,
            schedule=trainee.schedule,
        )
        score = None if trainee.recipe is None else trainee.recipe.score
        test = partial(evaluate, trainer, score=score)
        learner = Learner(self._model.body, trainer.step, test, trainer.state, trainer.load)
        trained = loop.train(session, trainee, recorder, trainer.replica, learner)
        # Not in a `finally`: after an error, the communication thread might wait for a lost rank.
        trainer.thread.close()
        sent = group.gather(trainer.sent_nbytes)
        to_send = planned_nbytes(self.workload, self._machine, config)
        return outcome_of(
            session,
            trainee,
            trained,
            partial(plan, self.workload, self._machine, config),
            config=config,
            traffic=tuple(
                Traffic(purpose, max(own[purpose] for own in sent), nbytes)
                for purpose, nbytes in to_send.items()
                if all(sent)
            ),
            head=self._head(trainer),
        )

    def _head(self, trainer: SplitTrainer) -> SplitHead:
        whole = own = 0
        for layer in self._model.head:
            for parameter in layer.parameters:
                copies = trainer.num_copies(parameter)
                if self._session.is_rehearsal:  # PacedSGD has no momentum, but training has
                    copies = _PACED_COPIES
                own += copies * parameter.nbytes
                of_output = copies * parameter.nbytes // layer.shard.size
                whole += of_output * layer.sharding.num_outputs
        return SplitHead(
            layers=tuple(self._model.shardings),
            state_nbytes=whole,
            own_state_nbytes=tuple(self._session.group.gather(own)),
        )

    def save(self, path: Path) -> None:
        """Write the whole model on rank 0; all ranks call it together."""
        save(path, self._model.module, self._model.shardings, self._session.group)


def _real(session: TrainingSession) -> tuple[SplitModel, setups.TrainingSetup]:
    """Load the data, and build this rank's part of the model."""
    settings, group = session.settings, session.group
    assert isinstance(settings, TrainSettings)
    recipe = recipe_of(settings.model, settings.data, settings.seed)
    batches = setups.share_batches(len(recipe.samples), settings.batch_size, settings.seed, group)
    whole, num_rows = build.describe_recipe(recipe, -(-settings.batch_size // group.world_size))
    cut = partial(build.with_possible_cut, workload=whole, config=session.config)
    workload = tried_with(recipe, cut)
    model = build.split(
        *(recipe.model, workload, session.config, group, settings.seed),
        inputs=recipe.example(1),
        rows_per_sample=num_rows,
    )
    setup = setups.trained_setup(settings, recipe, batches, workload, model.module, group.device)
    build.check_row_wise(setup.optimizer)
    return model, setup


def _paced(session: TrainingSession) -> tuple[SplitModel, setups.TrainingSetup]:
    settings, device, config = session.settings, session.device, session.config
    assert isinstance(settings, RehearseSettings)
    assert device is not None  # None: rehearsal with `slowdown`, which subbatch refuses
    sizes = evenly(settings.batch_size, config.workers)
    workload = workload_of(settings.model, sizes[0], settings.input_shape)
    times, own = device.times(workload), sizes[session.group.rank]
    model = paced_model(workload, config, session.group.rank, device)
    rows = (own,) if model.rows_per_sample == 1 else (own, model.rows_per_sample)
    share = Share(torch.zeros(own, 1), torch.zeros(rows, dtype=torch.int64), 1.0)
    return model, setups.TrainingSetup(
        model=model.module,
        workload=workload,
        source=lambda epoch, first_step=0: repeat(share),
        epoch_steps=setups.rehearsed_steps(settings),
        samples_per_step=settings.batch_size,
        optimizer=paced_optimizer(times.update_s / workload.num_parameters),
        learning_rate=0.0,
        times=times,
    )
