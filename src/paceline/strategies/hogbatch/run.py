"""The runner of strategy hogbatch: memory, workers, epochs, and what came of them."""

import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.core.compare import conform
from paceline.core.errors import InvalidInput
from paceline.core.machine import Machine
from paceline.core.timeline import Timeline
from paceline.core.workload import Workload
from paceline.data.dataset import Dataset, TensorSamples, require_memory
from paceline.data.sampler import shuffled
from paceline.links.group import Group, Member
from paceline.links.shared_tensors import SharedTensors
from paceline.strategies.hogbatch.config import Hogbatch
from paceline.strategies.hogbatch.coordinator import Conduct, Coordinator
from paceline.strategies.hogbatch.crew import check_threads
from paceline.strategies.hogbatch.fit import Trial, machine_of
from paceline.strategies.hogbatch.history import History
from paceline.strategies.hogbatch.optimizers import optimizer_of
from paceline.strategies.hogbatch.policy import Worker, policy_of
from paceline.strategies.hogbatch.replay import replay, traced_sizes
from paceline.strategies.hogbatch.replica import refer, tensors_of
from paceline.strategies.hogbatch.worker import COMMITS, INPUTS, ORDER, TARGETS, Learning
from paceline.strategies.hogbatch.workers import MOST_WORKERS, WorkerSpec
from paceline.training.loop import Epoch, evaluate

_SLACK_S = 1e-3  # a hook of the last layer runs a moment after the layer


@dataclass(frozen=True)
class Run:
    """All that a run needs. `batch_size` is the one that the learning rate was chosen for.

    `report` is told of each epoch, and ends the training by returning True; `begun` is told of the
    coordinator before the first epoch. Others are as in `Conduct`.
    """

    learning: Learning
    model: nn.Module
    workload: Workload
    data: Dataset
    specs: tuple[WorkerSpec, ...]
    config: Hogbatch
    batch_size: int
    epochs: int
    deadline_s: float = 30.0
    trial_s: float = 0.5
    report: Callable[[Epoch], bool] = lambda epoch: False
    begun: Callable[[Coordinator], None] = lambda coordinator: None
    advance: Callable[[int], None] = lambda size: None
    say: Callable[[str], None] = lambda text: None


@dataclass(frozen=True)
class Outcome:
    """What became of a run.

    `names` are the workers' devices by their numbers, `speeds` what they reached alone on the batch
    size, in samples/s, None for one that came to no trial; `machine` is this one, fitted to the
    trials. `traced` holds the layers of some batches of each worker, and
    `faults` where they depart from the plan. `peaks` are bytes of memory, `lost` says who and why.
    """

    epochs: tuple[Epoch, ...]
    names: tuple[str, ...]
    specs: tuple[WorkerSpec, ...]
    speeds: tuple[float | None, ...]
    trained_s: float
    history: History
    machine: Machine
    traced: Timeline
    faults: tuple[str, ...]
    peaks: dict[str, int]
    lost: tuple[str, ...]


def train(run: Run) -> Outcome:
    """Train the run's model in shared memory; afterwards it is the run's alone again.

    Raises InvalidInput if policy, thresholds, labels and data do not fit each other, or the loss is
    not finite; WorkerLost if no worker is left.
    """
    check(run)
    samples = _data_of(run.data)
    with (
        closing(SharedTensors.of(tensors_of(run.model), "the model's parameters")) as model,
        closing(SharedTensors.of(samples, "the training samples")) as data,
    ):
        refer(run.model, model.tensors)
        try:
            with Coordinator(run.config, _conduct(run), run.learning, model, data) as coordinator:
                return _train(run, coordinator)
        finally:
            refer(run.model, {name: tensor.clone() for name, tensor in model.tensors.items()})


def check(run: Run) -> None:
    """Raise InvalidInput if the run cannot be done as it is asked for."""
    check_threads(run.specs)
    optimizer_of(run.learning.optimizer, run.learning.learning_rate, run.learning.momentum)
    workers = [Worker(spec.kind, spec.threads, 1.0) for spec in run.specs]
    policy, num_samples = policy_of(run.config, workers, run.batch_size), len(run.data.train)
    for number, spec in enumerate(run.specs):
        most = policy.largest_batch(number)
        if most > num_samples:
            raise InvalidInput(
                f"{_field(run.config, spec)}: policy {run.config.policy} gives worker {number} "
                f"({spec}) batches of up to {most:,} samples, but {run.data.name} has "
                f"{num_samples:,} to train on; allow at most so many"
            )


def _field(config: Hogbatch, spec: WorkerSpec) -> str:
    """Return what decides on the largest batch of a worker."""
    if config.policy == "hogwild":
        return "workers"
    if config.policy in ("hogbatch", "proportional"):
        return "batch_size"
    return "cpu_batch" if spec.kind == "cpu" else "gpu_batch"


def _data_of(data: Dataset) -> dict[str, Tensor]:
    """Return what workers see of the data: the samples, the epoch's order, and what is done."""
    samples, num_samples = data.train, len(data.train)
    if isinstance(samples, TensorSamples):
        inputs, targets = samples.inputs, samples.targets
    else:
        require_memory(num_samples, data.sample_shape, data.name)
        inputs, targets = samples.__getitems__(range(num_samples))
    check_labels(data, targets)
    return {
        INPUTS: inputs,
        TARGETS: targets,
        ORDER: torch.arange(num_samples),
        COMMITS: torch.full((MOST_WORKERS,), -1),
    }


def check_labels(data: Dataset, targets: Tensor) -> None:
    """Raise InvalidInput for the first class number that is none of the data set's."""
    if targets.dtype == torch.bool:  # a sample may have several labels
        return
    wrong = ((targets < 0) | (targets >= data.num_classes)).nonzero()
    if len(wrong):
        row = int(wrong[0, 0])
        raise InvalidInput(
            f"{data.name}: training sample {row} has label {targets[row].tolist()}; labels of "
            f"{data.num_classes} classes are 0 to {data.num_classes - 1}"
        )


def _conduct(run: Run) -> Conduct:
    def sizes(spec: WorkerSpec) -> tuple[int, ...]:
        most = min(run.batch_size, len(run.data.train))
        return tuple(dict.fromkeys((min(spec.threads, most), most)))

    return Conduct(
        batch_size=run.batch_size,
        trial_sizes=sizes,
        deadline_s=run.deadline_s,
        trial_s=run.trial_s,
        traced_epoch=min(1, run.epochs - 1),
        advance=run.advance,
        say=run.say,
    )


def _train(run: Run, coordinator: Coordinator) -> Outcome:
    coordinator.start(run.specs)
    _check_split(run, coordinator)
    run.begun(coordinator)
    epochs: list[Epoch] = []
    alone = _alone(run.deadline_s)
    for number in range(run.epochs):
        order = torch.from_numpy(shuffled(len(run.data.train), run.learning.seed, number))
        loss, seconds = coordinator.train_epoch(number, order)
        epochs.append(_tested(run, number, loss, seconds, alone))
        if run.report(epochs[-1]):
            break
    spans, peaks = coordinator.finish()
    hands = coordinator.hands
    trials = [Trial(one.number, one.spec, one.tried) for one in hands if one.speed is not None]
    machine = machine_of(run.workload, trials)
    traced = Timeline(spans, "measured")
    names, specs = tuple(one.name for one in hands), tuple(one.spec for one in hands)
    sizes = traced_sizes(spans, {name: number for number, name in enumerate(names)})
    plan = replay(run.workload, machine, dict(enumerate(specs)), sizes)
    return Outcome(
        epochs=tuple(epochs),
        names=names,
        specs=specs,
        speeds=tuple(one.speed for one in hands),
        trained_s=coordinator.trained_s,
        history=coordinator.history,
        machine=machine,
        traced=traced,
        faults=tuple(conform(plan, traced, _SLACK_S)),
        peaks=peaks,
        lost=tuple(coordinator.lost),
    )


def _check_split(run: Run, coordinator: Coordinator) -> None:
    """Raise InvalidInput if a batch in proportion to the speeds is larger than the data."""
    if coordinator.largest_batch > len(run.data.train):
        raise InvalidInput(
            f"batch_size: in proportion to the speeds a worker would get "
            f"{coordinator.largest_batch:,} samples at once, but {run.data.name} has "
            f"{len(run.data.train):,} to train on; choose a smaller one"
        )


def _tested(run: Run, number: int, loss: float, seconds: float, alone: Group) -> Epoch:
    test_loss, correct = evaluate(run.model, run.data.test, alone)
    num_samples = len(run.data.test)
    return Epoch(number, loss, test_loss / num_samples, correct / num_samples, seconds)


def _alone(deadline_s: float) -> Group:
    """Return the group of the coordinator, which tests the model by itself."""
    device = torch.device("cpu")
    member = Member(0, os.getpid(), "", "", device.type)
    return Group(0, 1, device, (member,), None, None, deadline_s)
