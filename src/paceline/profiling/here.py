"""A profile on this rank: steps as they are and recorded, under torch.profiler, and their memory.

All ranks take the same steps at the same time, for ranks of one machine slow each other down.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module

import torch

from paceline.core.memory import kept_nbytes, replica_nbytes
from paceline.links.group import Group
from paceline.profile_result import TensorMemory, WorkerMemoryRow
from paceline.profile_settings import ProfileSettings
from paceline.profiling.operators import Annotating, Step, ThroughTorch, through_torch
from paceline.profiling.residency import forget_peak, held_nbytes, peak_nbytes
from paceline.profiling.steps import Blocks, Trainee, measure
from paceline.profiling.subject import Subject
from paceline.profiling.tracked import Tracked, track
from paceline.record.clock import Clock, clock_for
from paceline.record.recorder import Recorder
from paceline.strategies import find_exchange
from paceline.training.step import SGD, Share, train_step

_NUM_WARM_UP = 2
_TORCH_STEPS = 3
_LEARNING_RATE = 0.01


@dataclass(frozen=True)
class Findings:
    """What this rank found.

    `together` is what torch.profiler saw of steps with the other ranks, `alone` of steps of this
    rank's model by itself. `by_operator` is what operators took of memory and kept.
    """

    subject: Subject
    blocks: Blocks
    together: ThroughTorch
    alone: ThroughTorch
    memory: TensorMemory
    by_operator: dict[str, int]
    held: WorkerMemoryRow


def profile_here(settings: ProfileSettings, subject: Subject, group: Group) -> Findings:
    """Profile this rank's part of training. All ranks must call it together."""
    clock, device = clock_for(group.device), group.device
    name = f"{'gpu' if device.type == 'cuda' else 'cpu'}{group.rank}"
    recorder = Recorder(clock, name, group.rank)
    torch.manual_seed(settings.seed + group.rank)
    before = held_nbytes(device)
    forget_peak(device)
    trainee = _trainee(settings, subject, group)
    for _ in range(_NUM_WARM_UP):
        trainee.step(recorder)
    recorder.step_ends()
    blocks = measure(trainee, recorder, clock, group, settings.steps)
    held = WorkerMemoryRow(
        worker=group.rank, before_nbytes=before, training_nbytes=peak_nbytes(device)
    )
    together, alone = _through_torch(trainee, clock, name, group)
    memory, by_operator = _tensors(trainee, subject, group)
    return Findings(subject, blocks, together, alone, memory, by_operator, held)


def _trainee(settings: ProfileSettings, subject: Subject, group: Group) -> Trainee:
    run = import_module(find_exchange(settings.strategy).run)
    replica = run.replica(subject.model, settings.config(), group)
    optimizer = SGD(_LEARNING_RATE).optimizer(subject.model)
    return Trainee(subject.model, replica, optimizer, subject.source(group.device))


def _through_torch(
    trainee: Trainee, clock: Clock, name: str, group: Group
) -> tuple[ThroughTorch, ThroughTorch]:
    """Return what torch.profiler sees of steps with the others and alone; close the replica."""

    def seen(step: Step) -> ThroughTorch:
        group.barrier()
        recorder = Annotating(clock, name, group.rank)
        return through_torch(step, recorder, trainee.model, group.device, _TORCH_STEPS)

    trainee.replica.record(None)
    together = seen(trainee.step)
    trainee.replica.close()
    return together, together if group.world_size == 1 else seen(trainee.step_alone)


def _tensors(
    trainee: Trainee, subject: Subject, group: Group
) -> tuple[TensorMemory, dict[str, int]]:
    """Return what the tensors of a step of this rank alone take, and which operators took it."""
    model, workload = trainee.model, subject.workload
    trainee.optimizer.zero_grad(set_to_none=True)
    share = next(trainee.source)
    tracked = _tracked(trainee, share, Recorder(clock_for(group.device), "", group.rank))
    gradients = workload.gradient_nbytes
    memory = TensorMemory(
        parameters=sum(parameter.nbytes for parameter in model.parameters()),
        gradients=gradients,
        momentum=gradients,
        features=kept_nbytes(workload.layers),
        inputs=workload.input_nbytes,
        predicted=replica_nbytes(workload),
        measured=tracked.peak_nbytes,
    )
    return memory, tracked.by_operator


def _tracked(trainee: Trainee, share: Share, recorder: Recorder) -> Tracked:
    def step() -> None:
        once: Iterator[Share] = iter((share,))
        train_step(trainee.model, trainee.optimizer, once, recorder)

    return track(step, trainee.model, trainee.optimizer, (share.inputs, share.targets))
