"""What a run of strategy wheel is asked to do."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from paceline.core.cost import Measured
from paceline.core.errors import InvalidInput
from paceline.core.machine import Machine
from paceline.core.workload import Workload
from paceline.data.dataset import Dataset
from paceline.data.sampler import ShardedBatches
from paceline.strategies.wheel.branch import Parent
from paceline.strategies.wheel.config import Wheel
from paceline.strategies.wheel.job import Job
from paceline.strategies.wheel.pace import Pace
from paceline.strategies.wheel.profile import boot_id
from paceline.strategies.wheel.split import (
    FROM_HUB,
    TO_HUB,
    Purpose,
    Split,
    messages,
    split,
)
from paceline.strategies.wheel.tally import Status
from paceline.training.loop import Epoch
from paceline.wire.keys import HubKeys

_CPU = torch.device("cpu")
LOOPBACK = "tcp://127.0.0.1:0"
_MOST_TRACED = 20
_NUM_COLD = 2  # steps that are not traced
_SPAN_NBYTES = 400  # as JSON
_LEAST_LARGEST = 4 << 20

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Fitted = tuple[Machine, Measured]


@dataclass(frozen=True)
class Run:
    """All that a run needs. `model_name`, `data_name` and `input_shape` are what workers load.

    `workload` describes one worker's part of a step. `devices` are those of the body processes that
    are started on this machine; None waits for workers of others. `prepared` is told where the hub
    listens, and the workers of each process that was started, `begun` the machine that was found,
    if it was profiled. A run with a `pace` is a rehearsal, in which stand-ins of the model take
    these times; nothing is tested. One with a `parent` is that of a child hub, which has the part
    `place` of the samples: nothing is profiled, traced or tested, and `make` is not called.
    """

    model_name: str
    num_classes: int | None
    data_name: str
    input_shape: tuple[int, ...] | None
    model: nn.Module
    workload: Workload
    data: Dataset
    config: Wheel
    make: Make
    batch_size: int
    epochs: int
    seed: int
    device: torch.device = _CPU
    devices: tuple[str, ...] | None = None
    address: str = LOOPBACK
    run_id: str = "wheel"
    keys: HubKeys | None = None
    profile_s: float = 1.0
    deadline_s: float = 30.0
    wait_s: float = 600.0
    snapshots: Path | None = None
    snapshot_s: float = 60.0
    resume: bool = False
    pace: Pace | None = None
    parent: Parent | None = None
    place: tuple[int, int] = (0, 1)
    report: Callable[[Epoch], None] = lambda epoch: None
    prepared: Callable[[str, dict[int, tuple[int, ...]]], None] = lambda address, pids: None
    begun: Callable[[Fitted | None], None] = lambda fitted: None
    look: Callable[[Status], None] = lambda status: None
    say: Callable[[str], None] = lambda text: None

    @property
    def steps_per_epoch(self) -> int:
        """The steps in which all samples are taken once; InvalidInput if they cannot be shared."""
        return len(self.batches_of(0))

    @property
    def num_steps(self) -> int:
        """The steps of each worker."""
        return self.epochs * self.steps_per_epoch

    def batches_of(self, worker: int) -> ShardedBatches:
        """Return a worker's share of the samples."""
        number, count = self.place
        workers = self.config.workers
        part, parts = number * workers + worker, count * workers
        return ShardedBatches(len(self.data.train), self.batch_size, part, parts, self.seed)


def resolved(run: Run) -> tuple[Run, Split]:
    """Return the run with the head's first layer named, and the halves.

    InvalidInput if there is no head worth splitting off, or the lanes would wait for each other.
    """
    if run.config.lanes > 1 and run.config.staleness == 0:
        raise InvalidInput(
            "staleness: lanes that alternate fetch a step ahead; allow at least 1, or take lanes=1"
        )
    parts = split(run.workload, run.config)
    return replace(run, config=replace(run.config, head=parts.head.layers[0].name)), parts


def job_of(run: Run) -> Job:
    """Return what the workers of a run are told.

    The last steps of the second epoch are traced, or of the only one, which keeps half of its own.
    """
    assert run.config.head is not None
    steps = run.steps_per_epoch
    steady = max(0, steps - _NUM_COLD)
    num_traced = min(_MOST_TRACED, steady if run.epochs > 1 else steady // 2)
    if run.parent is not None:
        num_traced = 0
    return Job(
        model=run.model_name,
        num_classes=run.num_classes,
        data=run.data_name,
        input_shape=run.input_shape,
        batch_size=run.batch_size,
        epochs=run.epochs,
        seed=run.seed,
        first=run.config.head,
        config=run.config,
        first_traced=min(2, run.epochs) * steps - num_traced,
        num_traced=num_traced,
        profile_s=run.profile_s,
        boot_id=boot_id(),
        pace=run.pace,
        place=run.place,
    )


def largest_nbytes(parts: Split, config: Wheel) -> int:
    """Return the bytes that no message of a run exceeds."""
    sent = messages(parts, config)
    together = sent[Purpose.LABELS].nbytes + sent[Purpose.ACTIVATIONS].nbytes
    trace = _MOST_TRACED * (2 * len(parts.body.layers) + len(Purpose)) * _SPAN_NBYTES
    whole = parts.body.gradient_nbytes + parts.head.gradient_nbytes  # to and from a child hub
    most = max(together, trace, whole, *(sent[p].nbytes for p in (*TO_HUB, *FROM_HUB)))
    return max(_LEAST_LARGEST, most + most // 8)
