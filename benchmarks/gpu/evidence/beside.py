"""What computation loses beside an exchange, and what buckets cost where none is needed.

Steps of a model run alone, and beside work that goes on without a pause: copies to the host and
back, as those of `host`; or a kernel of 4 or 24 blocks that adds memory to memory. The kernel
stands in for those of a collective, since NCCL refuses two ranks on one GPU: it takes as many
processors, and as much bandwidth as they move. By how much longer a step takes is `beside_exchange`
of a machine's losses. The same steps in DistributedDataParallel of one rank show what hooks, copies
and launches of buckets cost.
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

_NBYTES, _SMOKE_NBYTES = 2**28, 2**16  # of a copy, and of the memory that a kernel adds
_NUM_BLOCKS = (4, 24)  # of kernels: some rings over PCIe, and as many as NCCL takes over NVLink
_BUCKETS_MB = (1, 25, 1000)
_ROUNDS, _BLOCK_S = 4, 0.15  # of steps without anything beside them
_OUTLASTING = 2.0  # times as long as these
_NUM_WARM_UP = 3
_ALONE = "alone"
Work = Callable[[], object]


def run(part: Part) -> None:
    """Measure steps of each model beside each load, and in buckets of each size."""
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
    """Return what goes on beside steps: for each load what its streams do again and again."""
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
    """Return what steps take beside each load, and what of it goes on meanwhile."""
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
    """Work that streams of its own do again and again, one stream for each of `works`.

    `once_s`: what all streams take for their work once, with nothing else to do.
    """

    def __init__(self, device: Device, works: list[Work], warm_up_s: float) -> None:
        self._device, self._works = device, works
        self._streams = [device.new_stream() for _ in works]
        self._events: list[list[Any]] = [[] for _ in works]
        # A GPU that was idle needs a while until its clocks are those of one that works.
        self._alone(math.ceil(warm_up_s / self._alone(1)) + 1)
        self.once_s = self._alone(4)

    def _alone(self, num_times: int) -> float:
        begun = time.perf_counter()
        self._queue(num_times)
        self.end()
        return (time.perf_counter() - begun) / num_times

    def begin(self, seconds: float) -> None:
        """Have the streams work for about so long."""
        self._events = [[] for _ in self._works]
        self._queue(2 + math.ceil(seconds / self.once_s))

    def progress(self, seconds: float) -> tuple[float, bool]:
        """Return how fast the streams were, over their pace alone; and whether all still work."""
        done = [sum(event.is_reached for event in events) for events in self._events]
        still = all(not events[-1].is_reached for events in self._events)
        return sum(done) / len(done) * self.once_s / seconds, still

    def end(self) -> None:
        """Wait for the end of all that is queued."""
        self._device.synchronize()

    def _queue(self, num_times: int) -> None:
        for _ in range(num_times):
            for stream, work, events in zip(self._streams, self._works, self._events, strict=True):
                with self._device.use(stream):
                    work()
                events.append(stream.record())


def _in_buckets(task: Task, device: Device, rounds: int, block_s: float) -> dict[str, Any]:
    """Return what steps take without buckets, and in buckets of each size, on one rank."""
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
    gc.collect()  # modules lie in cycles, and the next model needs the memory
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
    """Return the number of steps that take so long, at least two."""
    return max(2, math.ceil(block_s / (_timed(trainee, device, 2) / 2)))


def _timed(trainee: Trainee, device: Device, num_steps: int) -> float:
    """Return the seconds of so many steps, whatever other streams do."""
    begun = time.perf_counter()
    for _ in range(num_steps):
        trainee.step()
    device.current_stream().synchronize()
    return time.perf_counter() - begun


@contextmanager
def _one_rank(device: Device) -> Iterator[None]:
    """Be the only rank of a group."""
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
