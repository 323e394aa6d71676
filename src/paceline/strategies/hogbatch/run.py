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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_model
from torch import Tensor, nn

from paceline.checkpoints.state import check_fits
from paceline.checkpoints.tensor_file import Tensors, within
from paceline.core.cost import ProfiledCost, Roofline
from paceline.core.errors import InvalidInput
from paceline.core.machine import DeviceKind
from paceline.core.outcome import Epoch, Outcome
from paceline.core.settings import TrainSettings
from paceline.core.strategy import PricedMachine
from paceline.core.timeline import Origin, Span, Timeline
from paceline.exchange.checkpoints import Saver, State, check_same_run
from paceline.exchange.learner import tested
from paceline.exchange.session import TrainingSession
from paceline.exchange.setup import learning_by, learning_of, optimizer_by
from paceline.links.interruption import interruptible
from paceline.links.shared_memory import SharedTensors
from paceline.strategies.hogbatch import messages
from paceline.strategies.hogbatch.config import MOST_WORKERS, Hogbatch, WorkerSpec, parse_workers
from paceline.strategies.hogbatch.coordinator import Coordinator, WorkerProcesses
from paceline.strategies.hogbatch.outcome import FinishedRun
from paceline.strategies.hogbatch.policy import SpeedTrial, policy_of
from paceline.strategies.hogbatch.replica import refer, tensors_of
from paceline.strategies.hogbatch.scheduled_rate import ScheduledRate
from paceline.strategies.hogbatch.speed_trial import Epochs, admit, machine_of
from paceline.training.data.dataset import TensorSamples
from paceline.training.data.sampler import shuffled
from paceline.training.models import describe
from paceline.training.recipes.named import recipe_of
from paceline.training.recipes.recipe import Recipe, built

logger = logging.getLogger(__name__)

_MODEL = "model/"  # prefix of tensors in a checkpoint
_PART = "hogbatch"  # the name of this strategy's JSON in a checkpoint
_MOST_THREADS_PER_CORE = 4


@contextmanager
def start(session: TrainingSession) -> Iterator["HogbatchRunner"]:
    """Load the data, build the model and put both into shared memory.

    The runner's `measure` starts the workers. Raises InvalidInput if settings, model and data do
    not match.
    """
    settings = session.settings
    assert isinstance(settings, TrainSettings)  # validation rejects rehearsals
    recipe = recipe_of(settings.model, settings.data, settings.seed)
    with runner_of(session, recipe, built(recipe, settings.seed)) as runner:
        yield runner


@contextmanager
def runner_of(
    session: TrainingSession, recipe: Recipe, model: nn.Module
) -> Iterator["HogbatchRunner"]:
    """Yield a runner whose workers share a model and its data.

    The workers end when the context ends. Each worker looks up the same `recipe` from the settings.
    """
    settings = session.settings
    assert isinstance(settings, TrainSettings)
    specs = parse_workers(settings.workers)
    _check(settings, session.config, specs, recipe)
    with (
        closing(SharedTensors.of(tensors_of(model), "the model's parameters")) as parameters,
        closing(SharedTensors.of(_tensors_of(recipe), "the training samples")) as data,
    ):
        training = messages.Training(settings, recipe.num_classes, parameters, data)
        refer(model, parameters.tensors)
        with WorkerProcesses(training, session.config, settings.deadline_s) as processes:
            sizes = epoch_sizes(settings, len(recipe.samples))
            tokens = recipe.tokens_per_sample
            coordinator = Coordinator(session, processes, data.tensors, sizes, tokens)
            yield HogbatchRunner(session, recipe, model, specs, coordinator)


def epoch_sizes(settings: TrainSettings, num_samples: int) -> tuple[int, ...]:
    """Return the number of samples of each epoch.

    With `settings.steps`, the last epoch may be partial.
    """
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
        specs: tuple[WorkerSpec, ...],
        coordinator: Coordinator,
    ) -> None:
        assert isinstance(session.settings, TrainSettings)
        self._session, self._settings = session, session.settings
        self._recipe, self._model, self._specs = recipe, model, specs
        self._epochs: list[Epoch] = []
        self._decisions: list[str] = []
        self._sizes = epoch_sizes(self._settings, len(recipe.samples))
        self.coordinator = coordinator
        example = recipe.example(self._settings.batch_size)
        self.workload = describe(model, example, self._settings.model)

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
        """Start the workers, measure their speeds and end workers that do not help.

        Returns a machine with the measured speeds of the remaining workers.
        """
        if self._session.resumed is not None:
            self._resume(self._session.resumed)
        for spec in self._specs:
            self.coordinator.processes.start(spec)
        self.coordinator.scheduler.rate_at = self._rates().factor  # computed while workers start
        trials = self._try_speeds()
        verdicts = () if self._settings.keep_all else admit(self._asked, trials)
        useless = [verdict for verdict in verdicts if not verdict.helps]
        for verdict in useless:
            self._decisions.append(verdict.why)
            logger.warning("%s; continuing without it (--keep-all keeps it)", verdict.why)
        if useless:
            self.coordinator.end_workers({verdict.worker for verdict in useless})
            trials = self._try_speeds()  # again, because the ended workers no longer use cores
        self.coordinator.begin()
        machine = machine_of(self.workload, trials)
        return PricedMachine(machine, ProfiledCost({}, Roofline.of(machine)))

    def _try_speeds(self) -> list[SpeedTrial]:
        self.coordinator.try_speeds()
        started = (worker.progress.trial for worker in self.coordinator.processes.running)
        return [one for one in started if one is not None]

    def _rates(self) -> ScheduledRate:
        recipe, settings = self._recipe, self._settings
        num_steps = -(-sum(self._sizes) // settings.batch_size)
        _, schedule = learning_by(recipe, settings, num_steps)
        return ScheduledRate(optimizer_by(recipe, settings), schedule, settings.batch_size)

    def train(self, config: Hogbatch) -> Outcome:
        """Train all epochs and return the outcome; `config` must be the session's.

        Raises InvalidInput if a loss is not finite, and WorkerLost if no worker is left.
        """
        session, coordinator = self._session, self.coordinator
        with interruptible(raises_again=True) as interruption:
            own = session.group, session.folder, self._settings, interruption, self._num_steps
            with closing(Saver(*own)) as saver:
                coordinator.between = lambda: saver.after(self._num_steps, self._saved)
                for _ in self.epochs():
                    pass
        return self.outcome()

    @property
    def _num_steps(self) -> int:
        return self.coordinator.scheduler.num_samples // self._settings.batch_size

    @property
    def _run(self) -> dict[str, Any]:
        """The settings that must be the same in a resumed run and its checkpoint."""
        return {name: getattr(self._settings, name) for name in ("model", "batch_size", "seed")}

    def _saved(self, num_steps: int) -> State:
        """Pause the workers and return the run's state for a checkpoint."""
        self.coordinator.pause()
        tensors, values = self.state()
        progress = {"run": self._run, "strategy": _PART, "chunk": None}
        return State(tensors, {_PART: values, "progress": progress})

    def _resume(self, state: State) -> None:
        """Restore a checkpoint; raise InvalidInput if another strategy or run wrote it."""
        own = state.own_part(_PART)
        check_same_run(state.parts["progress"]["run"], self._run)
        if "known" not in own:
            raise InvalidInput(
                "resume",
                "the checkpoint is from an earlier version of Paceline",
                hint="start a new run",
            )
        self.restore(state.tensors, own)

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

    def state(self) -> tuple[Tensors, dict[str, Any]]:
        """Return the run's state: tensors by FILE/NAME, and a dict of plain values.

        Requires paused workers; between epochs workers are always paused. The model's tensors are
        not copies: copy them before training continues.
        """
        tensors, values = self.coordinator.state()
        model = {f"{_MODEL}{name}": own.detach() for name, own in tensors_of(self._model).items()}
        return model | tensors, values | {"epochs": list(map(asdict, self._epochs))}

    def restore(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Restore a `state`; must be called before `measure`.

        If the workers differ from the saved workers, all optimizers and random number generators
        start fresh. Raises InvalidInput if the model or data differ, or if all epochs are done.
        """
        own, saved = tensors_of(self._model), within(tensors, _MODEL)
        check_fits(own, saved, "resume")
        if len(values["epochs"]) >= len(self._sizes):
            raise InvalidInput(
                "resume",
                f"the checkpoint has already trained all {len(self._sizes)} epochs",
                hint="increase --epochs",
            )
        self.coordinator.restore(self._specs, tensors, values)
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(saved[name])
        self._epochs = [Epoch(**one) for one in values["epochs"]]

    def outcome(self) -> Outcome:
        """Stop the workers, and return the outcome of the epochs so far."""
        left: list[tuple[list[Span], int]] = [
            one or ([], 0) for one in self.coordinator.processes.stop(messages.Command.STOP)
        ]
        run = FinishedRun(self.coordinator, self._recipe, self._asked, self._epochs)
        traced = Timeline((span for spans, _ in left for span in spans), Origin.MEASURED)
        num_samples = sum(self._sizes[: len(self._epochs)])
        found = run.outcome(traced, [peak for _, peak in left], num_samples)
        return found.model_copy(update={"decisions": tuple(self._decisions)})

    def save(self, path: Path) -> None:
        """Write the trained model as safetensors.

        Tensors are cloned first, because safetensors rejects views of one memory block.
        """
        own = {name: tensor.clone() for name, tensor in tensors_of(self._model).items()}
        save_model(refer(self._model, own), str(path))


def _check(
    settings: TrainSettings, config: Hogbatch, specs: Sequence[WorkerSpec], recipe: Recipe
) -> None:
    cores = len(os.sched_getaffinity(0))
    threads = sum(spec.threads for spec in specs if spec.kind == DeviceKind.CPU)
    if threads > _MOST_THREADS_PER_CORE * cores:
        most = _MOST_THREADS_PER_CORE * cores
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

    The tensors are the epoch's sample order, the workers' committed batches, and the samples of a
    `TensorSamples` data set. Each worker loads any other data set itself.
    """
    samples = recipe.samples
    shared = {
        messages.ORDER: torch.arange(len(samples)),
        messages.COMMITTED: torch.full((MOST_WORKERS,), -1),
    }
    if isinstance(samples, TensorSamples):
        shared |= {messages.INPUTS: samples.inputs, messages.TARGETS: samples.targets}
    return shared
