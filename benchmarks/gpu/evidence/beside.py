"""Measure how concurrent copies slow down steps, and the cost of DDP buckets.

Steps run alone, and during continuous copies to the host and back on other streams, as in strategy
`host`. The relative increase of the step time is `beside_exchange` in a machine's losses. The same
steps in DistributedDataParallel with one rank show the cost of hooks, copies and launches of
buckets.
"""

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from evidence.hidden import BATCH_SIZES, SMOKE_SIZES, task_of
from part import Part
from torch.nn.parallel import DistributedDataParallel

import steps
from figures import shown, spread
from paceline.links.devices import Device
from ranks import in_turns
from steps import Task, Trainee, Wrap

_NBYTES, _SMOKE_NBYTES = 2**28, 2**16  # of a copy
_BUCKETS_MB = (1, 25, 1000)
_ROUNDS, _BLOCK_S = 4, 0.15  # a block of steps lasts 0.15 s if nothing else runs
_OUTLASTING = 2.0  # duration of the copies, relative to the steps alone
_NUM_WARM_UP = 3
_ALONE, _COPIES = "alone", "copies"


def run(part: Part) -> None:
    """Measure steps of each model during copies, and with each bucket size."""
    device = part.device
    copies = Copies(device, _SMOKE_NBYTES if part.smoke else _NBYTES)
    rounds, block_s = (2, 0.0) if part.smoke else (_ROUNDS, _BLOCK_S)
    with _one_rank(device):
        for name in SMOKE_SIZES if part.smoke else BATCH_SIZES:
            task = task_of(name, part.smoke, device.torch_device)
            found = _beside(task, device, copies, rounds, block_s)
            part.keep(f"{name}, beside", found, _beside_line(found))
            found = _in_buckets(task, device, rounds, block_s)
            part.keep(f"{name}, in buckets", found, _buckets_line(found))


class Copies:
    """Repeats copies to the host and back, each on a separate stream."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device = device
        values = torch.zeros(nbytes // 4, device=device.torch_device)
        other = torch.zeros_like(values)
        there, back = device.pinned_like(values), device.pinned_like(values)
        works: list[Callable[[], object]] = [
            lambda: there.copy_(values, non_blocking=True),
            lambda: other.copy_(back, non_blocking=True),
        ]
        self._works = [(device.new_stream(), work) for work in works]
        device.synchronize()  # the tensors are written
        self.begin(1)  # warm up
        device.synchronize()
        begun = time.perf_counter()
        self.begin(4)
        device.synchronize()
        self.once_s = (time.perf_counter() - begun) / 4

    def begin(self, num_times: int) -> None:
        """Queue copies on both streams."""
        self._ends = []
        for stream, work in self._works:
            with self._device.use(stream):
                for _ in range(num_times):
                    work()
                self._ends.append(self._device.record())

    @property
    def are_busy(self) -> bool:
        """Whether both streams still copy."""
        return not any(end.query() for end in self._ends)


def _beside(
    task: Task, device: Device, copies: Copies, rounds: int, block_s: float
) -> dict[str, Any]:
    """Return the step times alone and during copies."""
    trainee = _warm(task, device, steps.alone)
    num_steps = _steps_of(trainee, device, block_s)
    alone_s = _timed(trainee, device, num_steps)
    num_copies = 2 + math.ceil(_OUTLASTING * alone_s / copies.once_s)
    seconds: dict[str, list[float]] = {_ALONE: [], _COPIES: []}
    outlasted = True
    for name in in_turns(seconds, rounds):
        if name == _COPIES:
            copies.begin(num_copies)
        seconds[name].append(_timed(trainee, device, num_steps) / num_steps)
        if name == _COPIES:
            outlasted &= copies.are_busy
            device.synchronize()
    found: dict[str, Any] = {name: {"seconds": spread(own)} for name, own in seconds.items()}
    middle = found[_ALONE]["seconds"]["median"]
    longer = [one / middle - 1 for one in seconds[_COPIES]]
    found[_COPIES] |= {"beside_exchange": spread(longer), "outlasted_steps": outlasted}
    return found


def _in_buckets(task: Task, device: Device, rounds: int, block_s: float) -> dict[str, Any]:
    """Return the step times on one rank, without DDP and with each bucket size."""
    trainees = {_ALONE: _warm(task, device, steps.alone)}
    for mb in _BUCKETS_MB:
        trainees[f"{mb} MB"] = _warm(task, device, steps.ddp(mb))
    num_steps = _steps_of(trainees[_ALONE], device, block_s)
    steps_s: dict[str, list[float]] = {name: [] for name in trainees}
    for name in in_turns(trainees, rounds):
        steps_s[name].append(_timed(trainees[name], device, num_steps) / num_steps)
    found = {
        name: {"seconds": spread(steps_s[name]), "buckets": _num_buckets(trainee.parallel)}
        for name, trainee in trainees.items()
    }
    trainees.clear()
    gc.collect()  # free modules in reference cycles: the next model needs the memory
    return found


def _num_buckets(parallel: object) -> int:
    if not isinstance(parallel, DistributedDataParallel):
        return 0
    said = parallel._get_ddp_logging_data()
    sizes = said.get("rebuilt_bucket_sizes") or said["bucket_sizes"]
    return len(str(sizes).split(","))


def _warm(task: Task, device: Device, wrap: Wrap) -> Trainee:
    trainee = Trainee(task, wrap)
    for _ in range(_NUM_WARM_UP):
        trainee.step()
    device.synchronize()
    return trainee


def _steps_of(trainee: Trainee, device: Device, block_s: float) -> int:
    """Return the number of steps that take `block_s` seconds, at least two."""
    return max(2, math.ceil(block_s / (_timed(trainee, device, 2) / 2)))


def _timed(trainee: Trainee, device: Device, num_steps: int) -> float:
    """Return the seconds of `num_steps` steps, without waiting for other streams."""
    begun = time.perf_counter()
    for _ in range(num_steps):
        trainee.step()
    device.current_stream().synchronize()
    return time.perf_counter() - begun


@contextmanager
def _one_rank(device: Device) -> Iterator[None]:
    """Initialise a process group with one rank."""
    here = {"device_id": device.torch_device} if device.backend == "nccl" else {}
    dist.init_process_group(device.backend, store=dist.HashStore(), rank=0, world_size=1, **here)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _beside_line(found: Mapping[str, Any]) -> str:
    row = found[_COPIES]
    ended = "" if row["outlasted_steps"] else " (the copies ended before)"
    share = shown(row["beside_exchange"], 1e2, 1)
    alone = shown(found[_ALONE]["seconds"], 1e3, 1)
    return f"alone {alone} ms; beside copies {share} % longer{ended}"


def _buckets_line(found: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} ({row['buckets']} buckets) {shown(row['seconds'], 1e3, 2)} ms"
        for name, row in found.items()
    )
