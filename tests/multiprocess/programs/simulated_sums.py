"""All-reduces of encoded values on simulated GPUs, beside the same on CPUs."""

import json
import random
import sys
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.codecs.codec import Cast, Codec
from paceline.codecs.names import find_codec
from paceline.devices.simulated_tensors import devices
from paceline.exchange import compressed
from paceline.exchange.compressed import CompressedAllReduce
from paceline.links.group import Group
from paceline.links.rendezvous import joined, process_group

PIECE = 1 << 10
LENGTHS = (3, 2 * PIECE + 17)
DEADLINE_S = 60.0
NAMES = ("float32", "dynamic8", "e3m0", "onebit")
(DEVICE,) = devices(1)
CPU, GPU = torch.device("cpu"), DEVICE.torch_device


def made(name: str) -> Codec:
    return Cast("float32") if name == "float32" else find_codec(name)


def values_of(rank: int, step: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + 10 * step + length)
    return torch.randn(length, generator=generator)


def summed(all_reduce: CompressedAllReduce, name: str, rank: int) -> list[Tensor]:
    """Return the means of two steps; on a device, what the caller's stream makes of them."""
    on, found = all_reduce.device, []
    for step in range(2):
        all_reduce.begin_step()
        works = []
        for length in LENGTHS:
            # Made in the caller's stream just before, and maybe not there yet.
            values = values_of(rank, step, length).to(on).mul_(2.0).mul_(0.5)
            make = partial(made, name)
            works.append(all_reduce.begin(f"{name}/{length}", values, make, dist.get_world_size()))
            del values
        found += [work.future.wait() * 1.0 for work in works]
    return [one.cpu() for one in found]


def voided(all_reduce: CompressedAllReduce, rank: int) -> list[bool]:
    """Return whether values that are not finite on one rank are NaN on all."""
    found = []
    for name in ("dynamic8", "e3m0"):
        values = torch.ones(2000, device=all_reduce.device)
        if rank == 1:
            values[7] = torch.inf
        all_reduce.begin_step()
        work = all_reduce.begin("void", values, partial(made, name))
        found += [bool(work.future.wait().isnan().all()), work.num_nonfinite > 0]
    return found


def main() -> None:
    """Print, on rank 0, which codecs give other bits on the device than on the host."""
    compressed.PIECE = PIECE
    with process_group(DEADLINE_S, CPU) as group:
        generator = random.Random(group.rank)
        DEVICE.delays = lambda stream, what: generator.choice([0.0, 0.0, 2e-4, 3e-3])
        here, there = (
            CompressedAllReduce(range(group.world_size), device, DEADLINE_S)
            for device in (CPU, GPU)
        )
        differing = []
        for name in NAMES:
            pair = (summed(one, name, group.rank) for one in (here, there))
            differing += [name for one, other in zip(*pair, strict=True) if not one.equal(other)]
        there.check_same("dynamic8")
        rows = {
            "differing": differing,
            "void": voided(there, group.rank),
            "agreed": there.agree([float(group.rank), 2.0]),
            "deadline": joined(GPU).deadline_s,
        }
        here.close()
        there.close()
        DEVICE.synchronize()
        _print(rows, group)


def _print(rows: dict[str, object], group: Group) -> None:
    gathered = group.gather(rows)
    if group.rank == 0:
        sys.stdout.write(json.dumps(gathered) + "\n")


if __name__ == "__main__":
    main()
