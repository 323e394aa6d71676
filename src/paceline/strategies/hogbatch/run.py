"""The runner of strategy hogbatch: shared memory, workers, epochs, checkpoints and the outcome.

A training step is `batch_size` samples. The workers pause between batches while the run writes a
checkpoint. The files of a checkpoint:

    model.safetensors      the shared model
    workers.safetensors    each worker's optimizer and random number generators
    log.safetensors        the log of all batches so far
    hogbatch.json          unassigned samples, counts, workers
"""

import logging
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import torch
from safetensors.torch import save_model
from torch import nn

from paceline.checkpoints.state import check_fits
from paceline.checkpoints.tensor_file import Tensors
from paceline.core.cost import ProfiledCost, Roofline
from paceline.core.errors import InvalidInput
from paceline.core.machine import DeviceKind
from paceline.core.outcome import Epoch, Outcome
from paceline.core.settings import TrainSettings
from paceline.core.strategy import PricedMachine
from paceline.exchange.checkpoints import Saver, State, check_same_run
from paceline.exchange.learner import tested
from paceline.exchange.session import TrainingSession
from paceline.exchange.setup import learning_by, learning_of, optimizer_by
from paceline.links.interruption import interruptible
from paceline.links.shared_memory import SharedTensors
from paceline.strategies.hogbatch import messages
from paceline.strategies.hogbatch.config import MOST_WORKERS, Hogbatch, parse_workers
from paceline.strategies.hogbatch.coordinator import Coordinator, WorkerProcesses
from paceline.strategies.hogbatch.outcome import outcome_of
from paceline.strategies.hogbatch.policy import policy_of
from paceline.strategies.hogbatch.replica import refer, tensors_of
from paceline.strategies.hogbatch.scheduled_rate import ScheduledRate
from paceline.strategies.hogbatch.speed_trial import Epochs, admit, machine_of
from paceline.training.data.dataset import TensorSamples
from paceline.training.data.sampler import shuffled
from paceline.training.models import describe
from paceline.training.recipes.named import recipe_of
from paceline.training.recipes.recipe import Recipe, built

logger = logging.getLogger(__name__)

_MODEL, _PART = "model", "hogbatch"  # names of this strategy's files in a checkpoint
_MOST_THREADS_PER_CORE = 4


@contextmanager
def start(session: TrainingSession) -> Iterator["HogbatchRunner"]:
    """Load the data, build the model and put both into shared memory.

    The runner's `measure` starts the workers, which end when the context ends. Raises InvalidInput
    if settings, model and data do not match.
    """
    settings = session.settings
    assert isinstance(settings, TrainSettings)  # validation rejects rehearsals
    recipe = recipe_of(settings.model, settings.data, settings.seed)
    model = built(recipe, settings.seed)
    _check(settings, session.config, recipe)
    with (
        closing(SharedTensors.of(tensors_of(model), "the model's parameters")) as parameters,
        closing(SharedTensors.of(_tensors_of(recipe), "the training samples")) as data,
    ):
        training = messages.Training(settings, recipe.num_classes, parameters, data)
        refer(model, parameters.tensors)
        with WorkerProcesses(training, session.config) as processes:
            yield HogbatchRunner(session, recipe, model, processes)


def epoch_sizes(settings: TrainSettings, num_samples: int) -> tuple[int, ...]:
    """Return the number of samples of each epoch; with `steps`, the last one may be partial."""
    if settings.steps is None:
        return (num_samples,) * settings.epochs
    whole, rest = divmod(settings.steps * settings.batch_size, num_samples)
    return (num_samples,) * whole + ((rest,) if rest else ())


class HogbatchRunner:
    """Runs the coordinator: starts the workers, and tests the model between epochs."""

    def __init__(
        self,
        session: TrainingSession,
        recipe: Recipe,
        model: nn.Module,
        processes: WorkerProcesses,
    ) -> None:
        self._settings = settings = processes.training.settings
        self._session, self._recipe, self._model = session, recipe, model
        self._specs = parse_workers(settings.workers)
        self._sizes = epoch_sizes(settings, len(recipe.samples))
        self._epochs: list[Epoch] = []
        self._decisions: list[str] = []
        self.coordinator = Coordinator(session, processes, self._sizes, recipe.tokens_per_sample)
        self.workload = describe(model, recipe.example(settings.batch_size), settings.model)

    @property
    def samples_per_step(self) -> float:
        """The number of samples in a step of a plan: `batch_size` per worker."""
        return float(self._settings.batch_size * len(self._specs))

    @property
    def about(self) -> str:
        """A summary of the model and the workers in one line."""
        return (
            f"{self._settings.model}: {self.workload.num_parameters:,} parameters in "
            f"{len(self.workload.layers)} layers; workers {', '.join(map(str, self._specs))}"
        )

    @property
    def _asked(self) -> Epochs:
        num_cores, sizes = len(os.sched_getaffinity(0)), self._sizes
        return Epochs(self.workload, self._session.config, sizes[0], len(sizes), num_cores)

    def measure(self) -> PricedMachine:
        """Start the workers and end those that do not help; return a machine with their speeds."""
        if self._session.resumed is not None:
            self.restore(self._session.resumed)
        coordinator, settings = self.coordinator, self._settings
        coordinator.start_workers(self._specs)
        # Computed while the workers start.
        num_steps = -(-sum(self._sizes) // settings.batch_size)
        rates = ScheduledRate(*learning_by(self._recipe, settings, num_steps), settings.batch_size)
        coordinator.scheduler.rate_at = rates.factor
        trials = coordinator.try_speeds()
        useless = {} if settings.keep_all else admit(self._asked, trials)
        for reason in useless.values():
            self._decisions.append(reason)
            logger.warning("%s; continuing without it (--keep-all keeps it)", reason)
        if useless:
            coordinator.end_workers(useless)
            trials = coordinator.try_speeds()  # again: the ended workers no longer use cores
        coordinator.begin()
        machine = machine_of(self.workload, trials)
        return PricedMachine(machine, ProfiledCost({}, Roofline.of(machine)))

    def train(self, config: Hogbatch) -> Outcome:
        """Train all epochs and return the outcome; `config` must be the session's.

        Raises InvalidInput if a loss is not finite, and WorkerLost if no worker is left.
        """
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
        # The shared model is on the CPU.
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
        """Restore a `state`; must be called before the workers start.

        If the workers differ from the saved workers, all optimizers and random number generators
        start fresh. Raises InvalidInput if another strategy or run wrote the state, if the model or
        data differ, or if all epochs are done.
        """
        values = state.own_part(_PART)
        check_same_run(state.parts["progress"]["run"], self._run)
        own, saved = tensors_of(self._model), state.file(_MODEL)
        check_fits(own, saved, "resume")
        if len(values["epochs"]) >= len(self._sizes):
            raise InvalidInput(
                "resume",
                f"the checkpoint has already trained all {len(self._sizes)} epochs",
                hint="increase --epochs",
            )
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
        left = self.coordinator.processes.stop(messages.Command.STOP)
        own = self.coordinator, self._recipe, self._asked, self._epochs, self._decisions
        return outcome_of(*own, [one or ([], 0) for one in left])

    def save(self, path: Path) -> None:
        """Write the trained model as safetensors."""
        # Clone, because safetensors rejects views of one memory block.
        own = {name: tensor.clone() for name, tensor in tensors_of(self._model).items()}
        save_model(refer(self._model, own), str(path))


def _check(settings: TrainSettings, config: Hogbatch, recipe: Recipe) -> None:
    specs, cores = parse_workers(settings.workers), len(os.sched_getaffinity(0))
    threads = sum(spec.threads for spec in specs if spec.kind == DeviceKind.CPU)
    if threads > (most := _MOST_THREADS_PER_CORE * cores):
        raise InvalidInput(
            "workers", f"must have at most {most} threads on {cores} cores", got=threads
        )
    if settings.batch_size > (most := len(recipe.samples)):
        raise InvalidInput(
            "batch_size", f"must be at most the {most:,} training samples", got=settings.batch_size
        )
    optimizer_by(recipe, settings)
    policy_of(config, specs, [1.0] * len(specs), settings.batch_size)  # checks the policy


def _tensors_of(recipe: Recipe) -> Tensors:
    """Return the tensors that workers share in addition to the model.

    These include the samples of `TensorSamples`; each worker loads any other data set itself.
    """
    samples = recipe.samples
    shared = {
        messages.ORDER: torch.arange(len(samples)),
        messages.COMMITTED: torch.full((MOST_WORKERS,), -1),
    }
    if isinstance(samples, TensorSamples):
        shared |= {messages.INPUTS: samples.inputs, messages.TARGETS: samples.targets}
    return shared
