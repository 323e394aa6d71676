"""Measure how concurrent copies slow down steps, and the cost of DDP buckets.

Steps run alone, and during continuous copies to the host and back on other streams, as in strategy
`host`. The relative increase of the step time is `beside_exchange` in a machine's losses. The same
steps in DistributedDataParallel with one rank show the cost of hooks, copies and launches of
buckets.
"""

import math
import time
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from evidence.hidden import BATCH_SIZES, SMOKE_SIZES, task_of
from part import Part
from torch.nn.parallel import DistributedDataParallel

from figures import shown, spread
from paceline.links.devices import Device, device_of
from paceline.links.group import Group
from ranks import in_turns, on_ranks, timed
from steps import alone, ddp, taken

_HERE = Path(__file__).parent
_NBYTES, _SMOKE_NBYTES = 2**28, 2**16  # of a copy
_BUCKETS_MB = (1, 25, 1000)
_ROUNDS, _NUM_STEPS = 4, 5
_OUTLASTING = 2.0  # duration of the copies, relative to the steps alone
_ALONE, _COPIES = "alone", "copies"


def run(part: Part) -> None:
    """Measure steps of each model during copies, and with each bucket size."""
    for name in SMOKE_SIZES if part.smoke else BATCH_SIZES:
        found = on_ranks(_HERE.parent, "evidence.beside", 1, part.smoke, 1, case=name)
        part.keep(f"{name}, beside", found["beside"], _beside_line(found["beside"]))
        part.keep(f"{name}, in buckets", found["in_buckets"], _buckets_line(found["in_buckets"]))


def measure(group: Group, smoke: bool, name: str) -> dict[str, Any]:
    """Return a model's step times alone, during copies, and with each bucket size."""
    wraps = {_ALONE: alone, **{f"{mb} MB": ddp(mb) for mb in _BUCKETS_MB}}
    task = task_of(name, smoke, group.device)
    found = taken(task, wraps, group, _ROUNDS, 2 if smoke else _NUM_STEPS)
    in_buckets = {
        way: {
            "seconds": spread(list(chain.from_iterable(found.blocks[way]))),
            "buckets": _num_buckets(trainee.parallel),
        }
        for way, trainee in found.trainees.items()
    }
    device = device_of(group.device)
    copies = Copies(device, _SMOKE_NBYTES if smoke else _NBYTES)
    return {
        "beside": _beside(found.trainees[_ALONE].step, device, copies),
        "in_buckets": in_buckets,
    }


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


def _beside(step: Callable[[], object], device: Device, copies: Copies) -> dict[str, Any]:
    """Return the step times alone and during copies."""
    steps = timed(step, 0, device.current_stream().synchronize)  # waits for no other stream
    num_copies = 2 + math.ceil(_OUTLASTING * sum(steps(_NUM_STEPS)) / copies.once_s)
    seconds: dict[str, list[float]] = {_ALONE: [], _COPIES: []}
    outlasted = True
    for name in in_turns(seconds, _ROUNDS):
        if name == _COPIES:
            copies.begin(num_copies)
        seconds[name].append(sum(steps(_NUM_STEPS)) / _NUM_STEPS)
        outlasted &= name == _ALONE or copies.are_busy
        device.synchronize()
    found: dict[str, Any] = {name: {"seconds": spread(own)} for name, own in seconds.items()}
    middle = found[_ALONE]["seconds"]["median"]
    longer = spread([one / middle - 1 for one in seconds[_COPIES]])
    found[_COPIES] |= {"beside_exchange": longer, "outlasted_steps": outlasted}
    return found


def _num_buckets(parallel: object) -> int:
    if not isinstance(parallel, DistributedDataParallel):
        return 0
    said = parallel._get_ddp_logging_data()
    sizes = said.get("rebuilt_bucket_sizes") or said["bucket_sizes"]
    return len(str(sizes).split(","))


def _beside_line(found: Mapping[str, Any]) -> str:
    row = found[_COPIES]
    ended = "" if row["outlasted_steps"] else " (the copies ended before)"
    share = shown(row["beside_exchange"], 1e2, 1)
    alone_ms = shown(found[_ALONE]["seconds"], 1e3, 1)
    return f"alone {alone_ms} ms; beside copies {share} % longer{ended}"


def _buckets_line(found: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} ({row['buckets']} buckets) {shown(row['seconds'], 1e3, 2)} ms"
        for name, row in found.items()
    )
