"""The runner of strategy hogbatch: shared memory, workers, epochs, and the outcome."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_model
from torch import Tensor

from paceline.core.compare import conform
from paceline.core.cost import Measured, Roofline
from paceline.core.errors import InvalidInput
from paceline.core.machine import DeviceKind
from paceline.core.outcome import Epoch, Outcome, UnevenWorker, Updates
from paceline.core.settings import TrainSettings
from paceline.core.simulate import simulate
from paceline.core.strategy import Calibrated
from paceline.core.timeline import Origin, Timeline
from paceline.data.dataset import Dataset, TensorSamples, require_memory
from paceline.data.sampler import shuffled
from paceline.exchange.learner import evaluate
from paceline.exchange.session import TrainingSession
from paceline.links.shared_memory import SharedTensors
from paceline.models import describe
from paceline.models.factory import Fitted, fitted
from paceline.models.objective import objective_of
from paceline.recipes.named import USUAL_DATA, recipe_of_data
from paceline.recipes.optimizers import optimizer_for
from paceline.strategies.hogbatch import calibration, messages, statistics
from paceline.strategies.hogbatch.config import MOST_WORKERS, Hogbatch, WorkerSpec, parse_workers
from paceline.strategies.hogbatch.coordinator import Coordinator
from paceline.strategies.hogbatch.policy import policy_of
from paceline.strategies.hogbatch.processes import WorkerProcesses
from paceline.strategies.hogbatch.replica import device_for, refer, tensors_of

_SLACK_S = 1e-3  # a hook of the last layer runs a moment after the layer
_MOST_POINTS = 500
_MOST_THREADS_PER_CORE = 4
# The setting that bounds batches by policy; of other policies it is a worker's own thresholds.
_BOUNDED_BY = {"hogwild": "workers", "hogbatch": "batch_size", "proportional": "batch_size"}


@contextmanager
def start(session: TrainingSession) -> Iterator["HogbatchRunner"]:
    """Load the data, build the model and share both; workers are started by `measure`.

    Raises InvalidInput if the settings do not fit each other, the model or the data.
    """
    settings = session.settings
    if not isinstance(settings, TrainSettings):
        raise InvalidInput(f"strategy: {settings.strategy!r} can be planned, but not run here")
    with runner_of(
        session, fitted(settings.model, settings.data or USUAL_DATA, settings.seed)
    ) as runner:
        yield runner


@contextmanager
def runner_of(session: TrainingSession, trained: Fitted) -> Iterator["HogbatchRunner"]:
    """Share a model and its data; at the end no worker is left, and the model is private again."""
    settings = session.settings
    assert isinstance(settings, TrainSettings)
    specs = parse_workers(settings.workers)
    _check(settings, session.config, specs, trained.data)
    with (
        closing(SharedTensors.of(tensors_of(trained.model), "the model's parameters")) as model,
        closing(SharedTensors.of(_tensors_of(trained.data), "the training samples")) as samples,
    ):
        training = messages.Training(
            settings=settings,
            model=trained.name,
            num_classes=trained.num_classes,
            parameters=messages.SharedMemoryHandle(model.fd, model.entries),
            data=messages.SharedMemoryHandle(samples.fd, samples.entries),
        )
        refer(trained.model, model.tensors)
        with WorkerProcesses(training, session.config, settings.deadline_s) as processes:
            coordinator = Coordinator(session, processes, samples.tensors)
            runner = HogbatchRunner(session, trained, specs, coordinator)
            try:
                yield runner
            finally:
                runner.unshare()


class HogbatchRunner:
    """The coordinator's process: it starts the workers, and tests the model between epochs."""

    def __init__(
        self,
        session: TrainingSession,
        trained: Fitted,
        specs: tuple[WorkerSpec, ...],
        coordinator: Coordinator,
    ) -> None:
        assert isinstance(session.settings, TrainSettings)
        self._session, self._settings = session, session.settings
        self._model, self._data, self._specs = trained.model, trained.data, specs
        self._epochs: list[Epoch] = []
        self._score = objective_of(self._data).name
        self.coordinator = coordinator
        example = torch.zeros(self._settings.batch_size, *self._data.sample_shape)
        self.workload = describe(self._model, example, self._settings.model)
        self.samples_per_step = float(self._settings.batch_size * len(specs))
        self.about = (
            f"{self._settings.model}: {self.workload.num_parameters:,} parameters in "
            f"{len(self.workload.layers)} layers; workers {', '.join(map(str, specs))}"
        )

    def measure(self) -> Calibrated:
        """Start the workers and have them try their speed.

        Raises InvalidInput if one does not help, unless the settings say `force`. A worker that
        joins later is not judged.
        """
        self.coordinator.start(self._specs)
        num_samples, policy = len(self._data.train), self.coordinator.policy
        assert policy is not None  # all workers have tried their speed
        if max(policy.most) > num_samples:
            raise InvalidInput(
                f"batch_size: in proportion to the speeds a worker would get "
                f"{max(policy.most):,} samples at once, but {self._data.name} has "
                f"{num_samples:,} to train on; choose a smaller one"
            )
        trials = [worker.trial for worker in self.coordinator.processes.running]
        if not self._settings.force:
            num_epochs, num_cores = self._settings.epochs, len(os.sched_getaffinity(0))
            config = self._session.config
            epochs = calibration.Epochs(self.workload, config, num_samples, num_epochs, num_cores)
            reasons = [one.why for one in calibration.admit(epochs, trials) if not one.helps]
            if reasons:
                raise InvalidInput(f"{'; '.join(reasons)} (--force has all take part)")
        machine = calibration.machine_of(self.workload, trials)
        return Calibrated(machine, Measured({}, Roofline.of(machine)))

    def train(self, config: Hogbatch) -> Outcome:
        """Train all epochs with the session's configuration, which leaves nothing to choose.

        Raises InvalidInput if the loss is not finite, and WorkerLost if no worker is left.
        """
        for _ in self.epochs():
            pass
        return self.outcome()

    def epochs(self) -> Iterator[Epoch]:
        """Train epoch by epoch; a caller may stop before the last, and ask for the outcome."""
        if not self.coordinator.processes.workers:
            self.measure()
        settings, data, progress = self._settings, self._data, self._session.progress
        alone = replace(self._session.group, device=torch.device("cpu"))  # where the model lies
        progress.begin(len(data.train) * settings.epochs, "samples")
        recipe = recipe_of_data(data)
        for number in range(settings.epochs):
            order = torch.from_numpy(shuffled(len(data.train), settings.seed, number))
            loss, seconds = self.coordinator.train_epoch(number, order)
            test_loss, correct = evaluate(self._model, data.test, alone, recipe)
            num_tested = len(data.test)
            epoch = Epoch(number, loss, test_loss / num_tested, correct / num_tested, seconds)
            self._epochs.append(epoch)
            progress.epoch(epoch, self._score)
            yield epoch

    def outcome(self) -> Outcome:
        """Stop the workers, and return the outcome of the epochs so far."""
        config = self._session.config
        coordinator, workers = self.coordinator, self.coordinator.processes.workers
        spans, peaks = coordinator.processes.stop()
        self.unshare()
        names = [worker.name for worker in workers]
        trials = [worker.trial for worker in workers if worker.samples_per_s is not None]
        # The traced batches are planned again, with the sizes that they had.
        machine = calibration.machine_of(self.workload, trials)
        traced = Timeline(spans, Origin.MEASURED)
        specs = {worker.number: worker.spec for worker in workers}
        sizes_in_turn = calibration.traced_sizes(spans)
        plan = calibration.plan_of_batches(self.workload, machine, config, specs, sizes_in_turn)
        num_samples = len(self._data.train) * len(self._epochs)
        prediction = None
        # The plan knows neither workers that were lost nor those that joined late.
        if not coordinator.lost and len(workers) == len(self._specs):
            prediction = calibration.predict(self.workload, config, trials, num_samples)
        timeline = coordinator.log.timeline(names)
        samples, sizes = statistics.num_samples(timeline), statistics.batch_sizes(timeline)
        staleness = statistics.staleness(timeline)
        missed = sum(staleness.values(), Counter[int]())
        by_worker = coordinator.log.updates(names)
        updates = Updates(
            count=sum(by_worker.values()),
            by_worker=by_worker,
            staleness={name: dict(own) for name, own in staleness.items()},
            mean_staleness=sum(n * times for n, times in missed.items()) / max(1, missed.total()),
            gaps=tuple(coordinator.log.gaps(len(names), _MOST_POINTS)),
        )
        return Outcome(
            timeline=traced,
            predicted=simulate(plan, Roofline.of(machine)),
            config=config,
            samples_per_s=num_samples / coordinator.trained_s,
            trained_s=coordinator.trained_s,
            epochs=tuple(self._epochs),
            score=self._score,
            predicted_samples_per_s=prediction.samples_per_s if prediction else None,
            faults=tuple(conform(plan, traced, _SLACK_S)),
            lost=tuple(coordinator.lost),
            peak_memory_bytes=tuple(peaks),
            updates=updates,
            device=self._device_names(),
            workers=tuple(
                UnevenWorker(
                    name=worker.name,
                    spec=str(worker.spec),
                    tried_samples_per_s=worker.samples_per_s,
                    samples=samples.get(worker.name, 0),
                    updates_share=by_worker[worker.name] / updates.count,
                    predicted_share=prediction.shares.get(worker.name, 0.0) if prediction else None,
                    batch_sizes=tuple(statistics.changes(sizes.get(worker.name, []))),
                )
                for worker in workers
            ),
            utilisation=dict.fromkeys(names, 0.0) | statistics.utilisation(timeline),
            predicted_utilisation=prediction.utilisation if prediction else {},
        )

    def _device_names(self) -> str:
        """Return the products that the workers compute on."""
        specs = [worker.spec for worker in self.coordinator.processes.workers]
        return ", ".join(dict.fromkeys(device_for(spec).name for spec in specs))

    def unshare(self) -> None:
        """Give the model memory of its own."""
        refer(self._model, {name: own.clone() for name, own in tensors_of(self._model).items()})

    def save(self, path: Path) -> None:
        """Write the trained model as safetensors."""
        save_model(self._model, str(path))


def _check(
    settings: TrainSettings, config: Hogbatch, specs: Sequence[WorkerSpec], data: Dataset
) -> None:
    cores = len(os.sched_getaffinity(0))
    threads = sum(spec.threads for spec in specs if spec.kind == DeviceKind.CPU)
    if threads > _MOST_THREADS_PER_CORE * cores:
        raise InvalidInput(
            f"workers: {threads} threads do not fit on {cores} cores; "
            f"at most {_MOST_THREADS_PER_CORE} can share one"
        )
    optimizer_for(settings)
    # Before their trials, workers count as equally fast.
    policy = policy_of(config, specs, [1.0] * len(specs), settings.batch_size)
    for number, (spec, most) in enumerate(zip(specs, policy.most, strict=True)):
        if most > len(data.train):
            by_kind = "cpu_batch" if spec.kind == DeviceKind.CPU else "gpu_batch"
            field = _BOUNDED_BY.get(config.policy, by_kind)
            raise InvalidInput(
                f"{field}: policy {config.policy} gives worker {number} "
                f"({spec}) batches of up to {most:,} samples, but {data.name} has "
                f"{len(data.train):,} to train on; allow at most so many"
            )


def _tensors_of(data: Dataset) -> dict[str, Tensor]:
    """Return the tensors that workers share: samples, the epoch's order, and committed batches.

    Raises InvalidInput for the first class number that is none of the data set's.
    """
    samples, num_samples = data.train, len(data.train)
    if isinstance(samples, TensorSamples):
        inputs, targets = samples.inputs, samples.targets
    else:
        require_memory(num_samples, data.sample_shape, data.name)
        inputs, targets = samples.__getitems__(range(num_samples))
    if targets.dtype != torch.bool:  # of samples with several labels none can be wrong
        wrong = ((targets < 0) | (targets >= data.num_classes)).nonzero()
        if len(wrong):
            row = int(wrong[0, 0])
            raise InvalidInput(
                f"{data.name}: training sample {row} has label {targets[row].tolist()}; labels of "
                f"{data.num_classes} classes are 0 to {data.num_classes - 1}"
            )
    return {
        messages.INPUTS: inputs,
        messages.TARGETS: targets,
        messages.ORDER: torch.arange(num_samples),
        messages.COMMITTED: torch.full((MOST_WORKERS,), -1),
    }
