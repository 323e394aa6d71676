"""The configuration of strategy hogbatch, and its workers: a number, or a list of their kinds."""

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass as plain_dataclass
from math import inf
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from paceline.core.errors import InvalidInput, shown
from paceline.core.machine import DeviceKind

PolicyName = Literal["hogwild", "hogbatch", "cpu_gpu", "proportional", "adaptive"]

MOST_WORKERS = 256
_MOST_THREADS = 4096
_FORM = "cpu:THREADS, cpu:THREADS@slow=FACTOR or gpu:INDEX"
_ITEM = re.compile(r"(cpu|gpu):([0-9]{1,9})(?:@slow=([0-9]{1,9}(?:\.[0-9]{1,9})?))?")
_OWN_POLICY = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_NUMBER = re.compile(r"[0-9]{1,9}")


def _in_order(thresholds: tuple[int, int]) -> tuple[int, int]:
    least, most = thresholds
    if not 1 <= least <= most:
        raise ValueError(
            f"a batch of at least {least} and at most {most} samples cannot be; "
            "write the smaller one first, at least 1, as in (16, 64)"
        )
    return thresholds


def _known_policy(name: str) -> str:
    known = get_args(PolicyName)
    if name not in known and not _OWN_POLICY.fullmatch(name):
        raise ValueError(
            f"{shown(name)} is none of {', '.join(known)}, and not of the form "
            "package.module:Policy"
        )
    return name


Thresholds = Annotated[tuple[int, int], AfterValidator(_in_order)]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Hogbatch:
    """A coordinator hands out batches to idle workers; `policy` decides how large they are.

    It is one of `PolicyName`, or package.module:Policy of one's own (docs/strategies/hogbatch.md).
    `threads` are those of a worker on cores, by default its share of the host's. `cpu_batch` and
    `gpu_batch` are the smallest and the largest batch: the first of each thread, the second of a
    GPU, by default a 64th of the workload's batch and all of it. Policy `cpu_gpu` gives CPUs the
    smallest and GPUs the largest. `alpha` is the factor by which `adaptive` changes a batch, and
    `beta` the fraction of a CPU worker's updates that survive (Ma, Rusu et al. 2020, algorithm 2).
    The learning rate of a worker whose latest batch missed k updates of others is divided by
    1 + k * `staleness_decay`. `gpu_depth` is the number of batches that a GPU has in work at once:
    of three, the samples of one are copied in, one is computed, and the update of one is added to
    the model. With one, all is done one after another, as in the paper.
    """

    workers: Annotated[int, Field(ge=1)] = 2
    policy: Annotated[str, AfterValidator(_known_policy)] = "adaptive"
    threads: Annotated[int, Field(ge=1)] | None = None
    cpu_batch: Thresholds = (16, 64)
    gpu_batch: Thresholds | None = None
    alpha: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 2.0
    beta: Annotated[float, Field(gt=0, le=1)] = 1.0
    staleness_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    gpu_depth: Annotated[int, Field(ge=1, le=3)] = 3

    def depth_of(self, kind: DeviceKind) -> int:
        """Return the number of batches that a worker on such a device has in work at once."""
        return self.gpu_depth if kind == DeviceKind.GPU else 1


@plain_dataclass(frozen=True, slots=True)
class WorkerSpec:
    """The device of a worker process: so many threads of a CPU, or the GPU of an index.

    With `slow` above 1 it stands for a device that is so many times slower: the arithmetic is real,
    and then the worker waits. A GPU has one thread, and the index of a CPU is 0.
    """

    kind: DeviceKind
    threads: int = 1
    index: int = 0
    slow: float = 1.0

    def __str__(self) -> str:
        if self.kind == DeviceKind.GPU:
            return f"gpu:{self.index}"
        return f"cpu:{self.threads}" + (
            f"@slow={self.slow:.9f}".rstrip("0").rstrip(".") if self.slow > 1 else ""
        )

    def name(self, number: int) -> str:
        """Return the name of the device of worker `number` in plans and results."""
        return f"{self.kind}{number}"


def parse_workers(workers: int | str, num_cores: int | None = None) -> tuple[WorkerSpec, ...]:
    """Return the workers that a setting asks for, such as 2 or cpu:1,cpu:1@slow=16,gpu:0.

    A number asks for as many workers on CPUs, which share the cores evenly: `num_cores`, by default
    those that this process may use. InvalidInput names the item that is wrong, and the right form.
    """
    text = str(workers).strip()
    items = [item.strip() for item in text.split(",")]
    is_number = _NUMBER.fullmatch(text) is not None
    count = int(text) if is_number else len(items)
    if not 1 <= count <= MOST_WORKERS:
        raise InvalidInput("workers", f"from 1 to {MOST_WORKERS} can train one model", got=count)
    if is_number:
        cores = num_cores or len(os.sched_getaffinity(0))
        return (WorkerSpec(DeviceKind.CPU, max(1, cores // count)),) * count
    specs = tuple(_parsed(item, number) for number, item in enumerate(items))
    gpus = Counter(spec.index for spec in specs if spec.kind == DeviceKind.GPU)
    twice = [index for index, times in gpus.items() if times > 1]
    if twice:
        raise InvalidInput("workers", f"gpu:{twice[0]} stands twice", hint="a GPU is one worker")
    return specs


def _parsed(item: str, number: int) -> WorkerSpec:
    match = _ITEM.fullmatch(item)
    if match is None:
        raise InvalidInput(
            "workers",
            f"{item!r} (worker {number}) is not of the form {_FORM}",
            hint="or write a number of workers",
        )
    kind, count, slow = match[1], int(match[2]), match[3]
    if kind == DeviceKind.GPU:
        if slow is not None:
            raise InvalidInput("workers", f"{item!r}: only a worker on a CPU can be slowed down")
        return WorkerSpec(DeviceKind.GPU, index=count)
    if not 1 <= count <= _MOST_THREADS:
        raise InvalidInput("workers", f"{item!r}: has from 1 to {_MOST_THREADS} threads")
    factor = 1.0 if slow is None else float(slow)
    if not 1 <= factor < inf:
        raise InvalidInput("workers", f"{item!r}: a worker can be slowed down only from 1 up")
    return WorkerSpec(DeviceKind.CPU, threads=count, slow=factor)


def adding_threads(specs: Sequence[WorkerSpec], num_cores: int) -> int:
    """Return the threads with which each GPU's worker adds updates: all cores that are left."""
    on_cores = sum(spec.threads for spec in specs if spec.kind == DeviceKind.CPU)
    num_gpus = sum(spec.kind == DeviceKind.GPU for spec in specs)
    return max(1, (num_cores - on_cores) // max(1, num_gpus))
