"""The configuration of strategy hogbatch, and the setting `workers`: a number or a list."""

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass as plain_dataclass
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from paceline.core.errors import InvalidInput, shown
from paceline.core.machine import DeviceKind

PolicyName = Literal["hogwild", "hogbatch", "cpu_gpu", "proportional", "adaptive"]

MOST_WORKERS = 256
_ITEM = re.compile(r"gpu:([0-9]{1,9})|cpu:([0-9]{1,9})(?:@slow=([0-9]{1,9}(?:\.[0-9]{1,9})?))?")
_OWN_POLICY = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_NUMBER = re.compile(r"[0-9]{1,9}")


def _in_order(bounds: tuple[int, int]) -> tuple[int, int]:
    if not 1 <= bounds[0] <= bounds[1]:
        form = "(smallest, largest) with 1 <= smallest <= largest, such as (16, 64)"
        raise ValueError(f"must be {form}, not {bounds}")
    return bounds


def _known_policy(name: str) -> str:
    known = get_args(PolicyName)
    if name not in known and not _OWN_POLICY.fullmatch(name):
        options = f"one of {', '.join(known)}, or a class package.module:Policy"
        raise ValueError(f"must be {options}, not {shown(name)}")
    return name


Bounds = Annotated[tuple[int, int], AfterValidator(_in_order)]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Hogbatch:
    """Options of strategy hogbatch, whose coordinator assigns batches to idle workers.

    A policy chooses the size of each batch.

    `policy`: a `PolicyName`, or package.module:Policy (docs/strategies/hogbatch.md).
    `threads`: the number of threads of a CPU worker; by default the worker's share of the host's
    cores.
    `cpu_batch`: the smallest and the largest number of samples per thread of a CPU worker.
    `gpu_batch`: the smallest and the largest batch size of a GPU. By default the largest size is
    the workload's batch size, and the smallest size is 1/64 of the largest size. Policy `cpu_gpu`
    always uses the smallest size on CPUs and the largest size on GPUs.
    `alpha`: the factor by which policy `adaptive` changes a batch size.
    `beta`: the fraction of a CPU worker's updates that other threads do not overwrite (Ma, Rusu et
    al. 2020, algorithm 2).
    `staleness_decay`: the learning rate is divided by 1 + k * `staleness_decay` if the worker's
    latest batch missed k updates of other workers.
    `gpu_depth`: the number of batches that a GPU overlaps. With 3, the GPU copies the samples of
    one batch, computes another batch, and copies the update of a third batch to the host. With 1,
    batches do not overlap, as in the paper.
    """

    workers: Annotated[int, Field(ge=1)] = 2
    policy: Annotated[str, AfterValidator(_known_policy)] = "adaptive"
    threads: Annotated[int, Field(ge=1)] | None = None
    cpu_batch: Bounds = (16, 64)
    gpu_batch: Bounds | None = None
    alpha: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 2.0
    beta: Annotated[float, Field(gt=0, le=1)] = 1.0
    staleness_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    gpu_depth: Annotated[int, Field(ge=1, le=3)] = 3

    def depth_of(self, kind: DeviceKind) -> int:
        """Return the number of batches that a device of this kind overlaps."""
        return self.gpu_depth if kind == DeviceKind.GPU else 1

    def weighted(self, spec: "WorkerSpec", num_updates: int) -> float:
        """Return `num_updates` as policies count it: times `beta` on a CPU, unchanged on a GPU."""
        return num_updates * (self.beta if spec.kind == DeviceKind.CPU else 1.0)


@plain_dataclass(frozen=True, slots=True)
class WorkerSpec:
    """The device of a worker process: a number of CPU threads, or a GPU's index.

    `slow`: a CPU worker waits after computing, as if its CPU were this many times slower.
    """

    kind: DeviceKind
    threads: int = 1
    index: int = 0
    slow: float = 1.0

    def __str__(self) -> str:
        if self.kind == DeviceKind.GPU:
            return f"gpu:{self.index}"
        slow = f"@slow={self.slow:.9f}".rstrip("0").rstrip(".") if self.slow > 1 else ""
        return f"cpu:{self.threads}{slow}"

    @property
    def num_cores(self) -> int:
        """The number of cores that a CPU worker's threads use; 0 for a GPU."""
        return self.threads if self.kind == DeviceKind.CPU else 0

    def num_updates(self, size: int) -> int:
        """Return how often a batch updates the model: once per CPU thread used, once on a GPU."""
        return min(self.threads, size)

    def name(self, number: int) -> str:
        """Return the name of worker `number`'s device in plans and results."""
        return f"{self.kind}{number}"


def parse_workers(workers: int | str, num_cores: int | None = None) -> tuple[WorkerSpec, ...]:
    """Parse the setting `workers`, such as 2 or cpu:1,cpu:1@slow=16,gpu:0.

    A plain number is a number of CPU workers that divide `num_cores` evenly, by default the cores
    that this process may use.
    """
    text = str(workers).strip()
    items = [item.strip() for item in text.split(",")]
    is_number = _NUMBER.fullmatch(text) is not None
    count = int(text) if is_number else len(items)
    if not 1 <= count <= MOST_WORKERS:
        raise InvalidInput("workers", f"must request 1 to {MOST_WORKERS} workers", got=count)
    if is_number:
        cores = num_cores or len(os.sched_getaffinity(0))
        return (WorkerSpec(DeviceKind.CPU, max(1, cores // count)),) * count
    specs = tuple(map(_parsed, items))
    for spec, times in Counter(specs).items():
        if spec.kind == DeviceKind.GPU and times > 1:
            raise InvalidInput("workers", "must list each GPU at most once", got=str(spec))
    return specs


def _parsed(item: str) -> WorkerSpec:
    match = _ITEM.fullmatch(item)
    if match is None:
        form = "cpu:THREADS, cpu:THREADS@slow=FACTOR or gpu:INDEX"
        raise InvalidInput("workers", f"must be a number, or a list of {form}", got=item)
    index, count, slow = match.groups()
    if index is not None:
        return WorkerSpec(DeviceKind.GPU, index=int(index))
    if (threads := int(count)) < 1:
        raise InvalidInput("workers", "must have at least 1 thread", got=item)
    factor = float(slow or 1)
    if factor < 1:
        raise InvalidInput("workers", "must have a factor of at least 1 after slow=", got=item)
    return WorkerSpec(DeviceKind.CPU, threads=threads, slow=factor)


def adding_threads(specs: Sequence[WorkerSpec], num_cores: int) -> int:
    """Return the number of threads with which each GPU worker adds updates to the shared model.

    GPU workers evenly divide the cores that CPU workers do not use; each gets at least one thread.
    """
    on_cores = sum(spec.num_cores for spec in specs)
    num_gpus = sum(spec.kind == DeviceKind.GPU for spec in specs)
    return max(1, (num_cores - on_cores) // max(1, num_gpus))
