"""Measure the sum of GPU gradients on the host, against NCCL and gloo.

NCCL needs a GPU for each rank. The host sums one tensor, and sixteen tensors whose copies and sums
overlap. The two copies, to the host and back, are also timed without a sum.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from part import Part

from figures import shown
from paceline.exchange.replicas import prober
from paceline.links.devices import device_of
from paceline.links.group import Group
from paceline.strategies import STRATEGIES
from paceline.strategies.host.config import HostReduce
from ranks import Variant, alternate, compare, on_ranks, timed

_HERE = Path(__file__).parent
_COUNTS = {60_000_000: (8, 5), 60_000: (12, 40)}  # values: (blocks, sums per block)
_SMOKE_COUNTS = {4_000: (2, 2)}
_NUM_LAYERS = 16
_BASELINE = "host"


def run(part: Part) -> None:
    """Time sums on a GPU that two ranks share, and with a GPU per rank."""
    for where, (num_ranks, num_gpus) in part.worlds().items():
        found = on_ranks(_HERE.parent, "evidence.sums", num_ranks, part.smoke, num_gpus)
        for case, rows in found.items():
            ways = (f"{name} {shown(row['seconds'], 1e3, 2)} ms" for name, row in rows.items())
            part.keep(f"{case}, {where}", rows, ", ".join(ways))


def measure(group: Group, smoke: bool) -> dict[str, Any]:
    """Return the seconds of each method for each number of values; only on rank 0."""
    counts = _SMOKE_COUNTS if smoke else _COUNTS
    return {f"{count:,} float32": _case(count, group, *size) for count, size in counts.items()}


def _case(count: int, group: Group, num_blocks: int, num_sums: int) -> dict[str, Any]:
    make = prober(STRATEGIES["host"], HostReduce(workers=group.world_size), group).make
    layer_nbytes = 4 * count // _NUM_LAYERS // 4 * 4
    probes = {
        _BASELINE: make([[4 * count]]),
        f"{_BASELINE}, {_NUM_LAYERS} layers": make([[layer_nbytes]] * _NUM_LAYERS),
    }
    gradients = torch.zeros(count, device=group.device)
    ways: dict[str, Callable[[], object]] = {
        **probes,
        dist.get_backend(): lambda: dist.all_reduce(gradients),
        "copies": _copies(gradients),
    }
    if dist.get_backend() != "gloo":
        ways["gloo"] = lambda: dist.all_reduce(gradients, group=group.control)
    synchronize = device_of(group.device).synchronize
    variants = [
        Variant(name, timed(way, 2, synchronize), group.world_size) for name, way in ways.items()
    ]
    blocks = alternate(variants, group, num_blocks, num_sums)
    for probe in probes.values():
        probe.close()
    return compare(blocks, _BASELINE) if group.rank == 0 else {}


def _copies(gradients: torch.Tensor) -> Callable[[], None]:
    """Return a function that copies to pinned host memory and back, without a sum."""
    here = device_of(gradients.device).pinned_like(gradients)

    def copy() -> None:
        here.copy_(gradients, non_blocking=True)
        gradients.copy_(here, non_blocking=True)

    return copy
