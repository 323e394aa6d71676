"""The runner of strategy hogbatch: shared memory, workers, epochs, checkpoints and the outcome.

A step counts as `batch_size` samples, whatever sizes batches have. The workers pause between
batches while the run writes a checkpoint. The files of a checkpoint:

    model.safetensors      the shared model
    workers.safetensors    each worker's optimizer and random number generators
    log.safetensors        the log of all batches so far
    hogbatch.json          unassigned samples, counts, workers
"""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import torch
from safetensors.torch import save_model
from torch import nn

from paceline.checkpoints.state import check_fits
from paceline.checkpoints.tensor_file import Tensors
from paceline.core.compare import conform
from paceline.core.cost import ProfiledCost, Roofline
from paceline.core.errors import InvalidInput
from paceline.core.outcome import Epoch, Outcome, UnevenWorker, Updates
from paceline.core.settings import TrainSettings
from paceline.core.simulate import simulate
from paceline.core.strategy import PricedMachine
from paceline.core.timeline import Origin, Span, Timeline
from paceline.exchange.checkpoints import Saver, State, check_same_run
from paceline.exchange.learner import tested
from paceline.exchange.session import TrainingSession
from paceline.exchange.setup import epoch_lengths, learning_by, learning_of, optimizer_by
from paceline.links.interruption import interruptible
from paceline.links.packet_workers import PacketWorkers
from paceline.links.shared_memory import SharedTensors
from paceline.strategies.hogbatch import messages, speed_trial, statistics
from paceline.strategies.hogbatch.config import MOST_WORKERS, Hogbatch, parse_workers
from paceline.strategies.hogbatch.coordinator import Coordinator, KnownWorker, WorkerProcess
from paceline.strategies.hogbatch.policy import policy_of
from paceline.strategies.hogbatch.replica import device_for, refer, tensors_of
from paceline.strategies.hogbatch.scheduler import ScheduledRate
from paceline.training.data.dataset import TensorSamples
from paceline.training.data.sampler import shuffled
from paceline.training.models import describe
from paceline.training.recipes.named import recipe_of
from paceline.training.recipes.recipe import Recipe, built

logger = logging.getLogger(__name__)

_MODEL, _PART = "model", "hogbatch"  # names of this strategy's files in a checkpoint
_MOST_THREADS_PER_CORE = 4
_SLACK_S = 1e-3  # tolerated error of traced times: a layer's hook runs shortly after the layer


@contextmanager
def start(session: TrainingSession) -> Iterator["HogbatchRunner"]:
    """Load the data, build the model and put both into shared memory.

    The runner's `measure` starts the workers, which end when the context ends. Raises InvalidInput
    if settings, model and data do not match.
    """
    settings = session.settings
    assert isinstance(settings, TrainSettings)  # earlier checks reject rehearsals
    recipe = recipe_of(settings.model, settings.data, settings.seed)
    model = built(recipe, settings.seed)
    _check(settings, session.config, recipe)
    with (
        closing(SharedTensors.of(tensors_of(model), "the model's parameters")) as parameters,
        closing(SharedTensors.of(_tensors_of(recipe), "the training samples")) as data,
        PacketWorkers[WorkerProcess](WorkerProcess.MODULE, settings.deadline_s) as processes,
    ):
        training = messages.Training(settings, recipe.num_classes, parameters, data)
        refer(model, parameters.tensors)
        yield HogbatchRunner(session, recipe, model, training, processes)


class HogbatchRunner:
    """Runs the coordinator: starts the workers, and tests the model between epochs."""

    def __init__(
        self,
        session: TrainingSession,
        recipe: Recipe,
        model: nn.Module,
        training: messages.Training,
        processes: PacketWorkers[WorkerProcess],
    ) -> None:
        self._settings = settings = training.settings
        self._session, self._recipe, self._model = session, recipe, model
        self._specs = parse_workers(settings.workers)
        self._sizes = sizes = epoch_lengths(settings, len(recipe.samples), settings.batch_size)
        self._epochs: list[Epoch] = []
        self._decisions: list[str] = []
        own = training, processes, sizes, recipe.tokens_per_sample
        self.coordinator = Coordinator(session, *own)
        self.workload = describe(model, recipe.example(settings.batch_size), settings.model)
        self.samples_per_step = float(settings.batch_size * len(self._specs))
        self.about = (
            f"{settings.model}: {self.workload.num_parameters:,} parameters in "
            f"{len(self.workload.layers)} layers; workers {', '.join(map(str, self._specs))}"
        )
        counts = sizes[0], len(sizes), len(os.sched_getaffinity(0))
        self._all_epochs = speed_trial.Epochs(self.workload, session.config, *counts)

    def measure(self) -> PricedMachine:
        """Start the workers, end those that do not speed up the run, and prepare training.

        Returns a machine with the measured speeds of the remaining workers, and a cost model.
        """
        if self._session.resumed is not None:
            self.restore(self._session.resumed)
        coordinator, settings = self.coordinator, self._settings
        coordinator.start(self._specs)
        # Create the schedule while the workers start.
        num_steps = -(-sum(self._sizes) // settings.batch_size)
        rates = ScheduledRate(*learning_by(self._recipe, settings, num_steps), settings.batch_size)
        coordinator.scheduler.rate_at = rates.factor
        trials = coordinator.try_speeds()
        useless = {} if settings.keep_all else speed_trial.admit(self._all_epochs, trials)
        for reason in useless.values():
            self._decisions.append(reason)
            logger.warning("%s; continuing without it (--keep-all keeps it)", reason)
        if useless:
            coordinator.end_workers(useless)
            # Repeat the trials, because the ended workers no longer use cores.
            trials = coordinator.try_speeds()
        coordinator.begin()
        machine = speed_trial.machine_of(self.workload, trials)
        return PricedMachine(machine, ProfiledCost({}, Roofline.of(machine)))

    def train(self, config: Hogbatch) -> Outcome:
        """Train all epochs and return the outcome; `config` must be the session's."""
        session, coordinator = self._session, self.coordinator
        with interruptible(raises_again=True) as interruption:
            own = session.group, session.folder, self._settings, interruption, self._num_steps
            with closing(Saver(*own)) as saver:
                coordinator.between = lambda: saver.after(self._num_steps, lambda _: self.state())
                for _ in self.epochs():
                    pass
        return self.outcome()

    @property
    def _num_steps(self) -> int:
        return self.coordinator.scheduler.num_samples // self._settings.batch_size

    def epochs(self) -> Iterator[Epoch]:
        """Train each epoch and yield its result; a caller may stop early and call `outcome`."""
        progress, recipe = self._session.progress, self._recipe
        # Test on the CPU, because the shared model is in host memory.
        alone = replace(self._session.group, device=torch.device("cpu"))
        learning = learning_of(recipe, self._settings)
        progress.begin(sum(self._sizes), "samples")
        progress.advance(self.coordinator.scheduler.num_samples)
        for number in range(len(self._epochs), len(self._sizes)):
            order = torch.from_numpy(shuffled(len(recipe.samples), self._settings.seed, number))
            loss, seconds = self.coordinator.train_epoch(number, order[: self._sizes[number]])
            found = tested(self._model, alone, recipe, learning)
            epoch = Epoch(number, loss, *found, seconds)
            self._epochs.append(epoch)
            progress.epoch(epoch, recipe.score_name)
            yield epoch

    def state(self) -> State:
        """Pause the workers and return the run's state for a checkpoint.

        The model's tensors are not copies: copy them before training continues.
        """
        tensors, values = self.coordinator.state()
        values["epochs"] = list(map(asdict, self._epochs))
        own = {f"{_MODEL}/{name}": one.detach() for name, one in tensors_of(self._model).items()}
        parts = {_PART: values, "progress": {"run": self._run, "strategy": _PART}}
        return State(own | tensors, parts)

    def restore(self, state: State) -> None:
        """Restore what `state` returned; must be called before the workers start.

        If the workers differ from the saved workers, all optimizers and random number generators
        start fresh. Raises InvalidInput if another strategy or run wrote the state, if the model or
        data differ, or if all epochs are done.
        """
        values = state.own_part(_PART)
        check_same_run(state.parts["progress"]["run"], self._run)
        own, saved = tensors_of(self._model), state.file(_MODEL)
        check_fits(own, saved, "resume")
        if len(values["epochs"]) >= len(self._sizes):
            problem = f"the checkpoint was saved after all {len(self._sizes)} epochs"
            raise InvalidInput("resume", problem, hint="increase --epochs")
        self.coordinator.restore(self._specs, state.tensors, values)
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(saved[name])
        self._epochs = [Epoch(**one) for one in values["epochs"]]

    @property
    def _run(self) -> dict[str, object]:
        """The settings that must be the same in a resumed run and its checkpoint."""
        return {name: getattr(self._settings, name) for name in ("model", "batch_size", "seed")}

    def outcome(self) -> Outcome:
        """Stop the workers, and return the outcome of the epochs so far."""
        coordinator, recipe = self.coordinator, self._recipe
        left: list[tuple[list[Span], int]] = [
            one or ([], 0) for one in coordinator.processes.stop(messages.Command.STOP)
        ]
        traced = Timeline((span for spans, _ in left for span in spans), Origin.MEASURED)
        workers = [one.progress for one in coordinator.processes.workers]
        trials = [one.trial for one in workers if one.trial is not None]
        prediction = speed_trial.Prediction(0.0, {}, {})  # empty: no prediction
        # Predictions assume that all workers train from the first epoch to the last.
        if not coordinator.lost and not coordinator.past and len(trials) == len(workers):
            prediction = speed_trial.predict(self._all_epochs, trials)
        sizes, config = statistics.traced_sizes(traced.spans), self._session.config
        plan, machine = speed_trial.plan_of_batches(self.workload, config, trials, sizes)
        made = coordinator.log.made([one.name for one in coordinator.known])
        updates = statistics.count_updates(coordinator.log, made)
        samples_per_s = coordinator.scheduler.num_samples / coordinator.trained_s
        return Outcome(
            timeline=traced,
            predicted=simulate(plan, Roofline.of(machine)),
            config=config,
            samples_per_s=samples_per_s,
            tokens_per_s=recipe.tokens_per_sample and recipe.tokens_per_sample * samples_per_s,
            trained_s=coordinator.trained_s,
            epochs=tuple(self._epochs),
            score=recipe.score_name,
            predicted_samples_per_s=prediction.samples_per_s or None,
            faults=tuple(conform(plan, traced, _SLACK_S)),
            lost=tuple(coordinator.lost),
            peak_memory_bytes=tuple(peak for _, peak in left),
            updates=updates,
            device=", ".join(dict.fromkeys(device_for(one.spec).name for one in workers)),
            workers=_workers(coordinator.known, made, updates, prediction),
            utilisation=statistics.utilisation(made),
            predicted_utilisation=prediction.utilisation,
            decisions=tuple(self._decisions),
        )

    def save(self, path: Path) -> None:
        """Write the trained model as safetensors."""
        # Clone, because safetensors rejects views of one memory block.
        own = {name: tensor.clone() for name, tensor in tensors_of(self._model).items()}
        save_model(refer(self._model, own), str(path))


def _check(settings: TrainSettings, config: Hogbatch, recipe: Recipe) -> None:
    specs, cores = parse_workers(settings.workers), len(os.sched_getaffinity(0))
    threads = sum(spec.num_cores for spec in specs)
    if threads > (most := _MOST_THREADS_PER_CORE * cores):
        problem = f"must have at most {most} threads on {cores} cores"
        raise InvalidInput("workers", problem, got=threads)
    if settings.batch_size > (most := len(recipe.samples)):
        problem = f"must be at most the {most:,} training samples"
        raise InvalidInput("batch_size", problem, got=settings.batch_size)
    optimizer_by(recipe, settings)
    policy_of(config, specs, [1.0] * len(specs), settings.batch_size)  # checks the policy


def _tensors_of(recipe: Recipe) -> Tensors:
    """Return the tensors that workers share in addition to the model.

    These include the recipe's samples if they are `TensorSamples`; each worker loads others itself.
    """
    samples = recipe.samples
    shared = {
        messages.ORDER: torch.arange(len(samples)),
        messages.COMMITTED: torch.full((MOST_WORKERS,), -1),
    }
    if isinstance(samples, TensorSamples):
        shared |= {messages.INPUTS: samples.inputs, messages.TARGETS: samples.targets}
    return shared


def _workers(
    known: Sequence[KnownWorker],
    made: statistics.Made,
    updates: Updates,
    prediction: speed_trial.Prediction,
) -> tuple[UnevenWorker, ...]:
    sizes = {name: tuple((one.ended_s, one.size) for one in own) for name, own in made.items()}
    return tuple(
        UnevenWorker(
            name=name,
            spec=spec,
            tried_samples_per_s=tried,
            samples=sum(size for _, size in sizes[name]),
            updates_share=updates.by_worker[name] / updates.count,
            predicted_share=prediction.shares.get(name),
            batch_sizes=statistics.changes(sizes[name]),
        )
        for name, spec, tried in known
    )
