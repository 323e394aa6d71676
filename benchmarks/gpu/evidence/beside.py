"""Measure how concurrent exchanges slow down steps, and the cost of DDP buckets.

Steps run alone, and during continuous work on other streams: copies to the host and back, as in
strategy `host`, or a kernel of 4 or 24 blocks that adds one array to another. The kernel replaces a
collective's kernels, because NCCL rejects two ranks on one GPU; it uses as many multiprocessors and
as much memory bandwidth. The relative increase of the step time is `beside_exchange` in a machine's
losses. The same steps in DistributedDataParallel with one rank show the cost of hooks, copies and
launches of buckets.
"""

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from statistics import median
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
from trainee import Task, Trainee, Wrap

_NBYTES, _SMOKE_NBYTES = 2**28, 2**16  # of a copy, and of a kernel's array
_NUM_BLOCKS = (4, 24)  # thread blocks: a few NCCL rings over PCIe; NCCL's number over NVLink
_BUCKETS_MB = (1, 25, 1000)
_ROUNDS, _BLOCK_S = 4, 0.15  # a block of steps lasts 0.15 s if nothing else runs
_OUTLASTING = 2.0  # duration of the load, relative to the steps alone
_NUM_WARM_UP = 3
_ALONE = "alone"
Work = Callable[[], object]


def run(part: Part) -> None:
    """Measure steps of each model during each load, and with each bucket size."""
    device = part.device
    loads = _loads(device, _SMOKE_NBYTES if part.smoke else _NBYTES)
    rounds, block_s = (2, 0.0) if part.smoke else (_ROUNDS, _BLOCK_S)
    with _one_rank(device):
        for name in SMOKE_SIZES if part.smoke else BATCH_SIZES:
            task = task_of(name, part.smoke, device.torch_device)
            found = _beside(task, device, loads, rounds, block_s)
            part.keep(f"{name}, beside", found, _beside_line(found))
            found = _in_buckets(task, device, rounds, block_s)
            part.keep(f"{name}, in buckets", found, _buckets_line(found))


def _loads(device: Device, nbytes: int) -> dict[str, list[Work]]:
    """Return the loads that run during steps: for each load, the work of each stream."""
    values = torch.zeros(nbytes // 4, device=device.torch_device)
    other = torch.zeros_like(values)
    there, back = device.pinned_like(values), device.pinned_like(values)
    loads: dict[str, list[Work]] = {
        "copies": [
            lambda: there.copy_(values, non_blocking=True),
            lambda: other.copy_(back, non_blocking=True),
        ]
    }
    if device.has_triton:
        from evidence.adding import add

        for count in _NUM_BLOCKS:
            loads[f"a kernel of {count} blocks"] = [partial(add, values, other, count)]
    return loads


def _beside(
    task: Task,
    device: Device,
    loads: Mapping[str, list[Work]],
    rounds: int,
    block_s: float,
) -> dict[str, Any]:
    """Return the step times during each load, and the load's pace during the steps."""
    trainee = _warm(task, device, steps.alone)
    num_steps = _steps_of(trainee, device, block_s)
    load_s = _OUTLASTING * _timed(trainee, device, num_steps)
    works = {name: Load(device, work, block_s) for name, work in loads.items()}
    steps_s: dict[str, list[float]] = {name: [] for name in (_ALONE, *works)}
    kept: dict[str, list[float]] = {name: [] for name in works}
    outlasted = dict.fromkeys(works, True)
    for name in in_turns(steps_s, rounds):
        if name == _ALONE:
            steps_s[name].append(_timed(trainee, device, num_steps) / num_steps)
            continue
        load = works[name]
        load.begin(load_s)
        took = _timed(trainee, device, num_steps)
        share, outlasts = load.progress(took)
        steps_s[name].append(took / num_steps)
        kept[name].append(share)
        outlasted[name] &= outlasts
        load.end()
    alone_s = median(steps_s[_ALONE])
    found: dict[str, Any] = {_ALONE: {"seconds": spread(steps_s[_ALONE])}}
    for name in works:
        found[name] = {
            "seconds": spread(steps_s[name]),
            "beside_exchange": spread([one / alone_s - 1 for one in steps_s[name]]),
            "pace_of_alone": spread(kept[name]),
            "work_alone_s": works[name].once_s,
            "outlasted_steps": outlasted[name],
        }
    return found


class Load:
    """Repeats each of `works` on a separate stream.

    `once_s`: seconds for one repetition on all streams, if nothing else runs.
    """

    def __init__(self, device: Device, works: list[Work], warm_up_s: float) -> None:
        self._device, self._works = device, works
        self._streams = [device.new_stream() for _ in works]
        self._events: list[list[Any]] = [[] for _ in works]
        # Warm up, because an idle GPU raises its clocks only after a while.
        self._alone(math.ceil(warm_up_s / self._alone(1)) + 1)
        self.once_s = self._alone(4)

    def _alone(self, num_times: int) -> float:
        begun = time.perf_counter()
        self._queue(num_times)
        self.end()
        return (time.perf_counter() - begun) / num_times

    def begin(self, seconds: float) -> None:
        """Queue work for about `seconds` on all streams."""
        self._events = [[] for _ in self._works]
        self._queue(2 + math.ceil(seconds / self.once_s))

    def progress(self, seconds: float) -> tuple[float, bool]:
        """Return the streams' pace relative to running alone, and whether all are still busy."""
        done = [sum(event.query() for event in events) for events in self._events]
        still = all(not events[-1].query() for events in self._events)
        return sum(done) / len(done) * self.once_s / seconds, still

    def end(self) -> None:
        """Wait for all queued work."""
        self._device.synchronize()

    def _queue(self, num_times: int) -> None:
        for _ in range(num_times):
            for stream, work, events in zip(self._streams, self._works, self._events, strict=True):
                with self._device.use(stream):
                    work()
                    events.append(self._device.record())


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
    lines = [f"alone {shown(found[_ALONE]['seconds'], 1e3, 1)} ms"]
    for name, row in found.items():
        if name == _ALONE:
            continue
        ended = "" if row["outlasted_steps"] else " (the load ended before)"
        share = shown(row["beside_exchange"], 1e2, 1)
        pace = shown(row["pace_of_alone"], 1e2, 0)
        lines.append(f"beside {name} {share} % longer{ended}, and these at {pace} % of their pace")
    return "; ".join(lines)


def _buckets_line(found: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} ({row['buckets']} buckets) {shown(row['seconds'], 1e3, 2)} ms"
        for name, row in found.items()
    )
