"""Run one rank of a benchmark's part; rank 0 writes the figures to OUTPUT.

Requires the environment variables that Paceline's launcher sets. PART is a module in FOLDER:

    rank.py FOLDER PART OUTPUT [--quick] [--gpus NUMBER] [--case CASE]
"""

import argparse
import faulthandler
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist

import ranks
from paceline.links.devices import device_of, gpus
from paceline.links.group import Group
from paceline.links.rendezvous import joined, process_group


@contextmanager
def pinned_ranks() -> Iterator[Group]:
    """Join the other ranks on the CPU; each rank has one core and thread."""
    ranks.pin()
    torch.set_num_threads(1)
    with process_group(ranks.DEADLINE_S) as group:
        yield group


@contextmanager
def gpu_ranks(num_gpus: int) -> Iterator[Group]:
    """Join the other ranks on the first `num_gpus` GPUs, shared if there are more ranks.

    NCCL refuses two ranks on one GPU; if GPUs are shared, the backend is gloo.
    """
    rank, num_ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    found = gpus()[:num_gpus]
    device = device_of(found[rank % len(found)])
    backend = device.backend if len(found) >= num_ranks else "gloo"
    with device.use():
        dist.init_process_group(backend, timeout=timedelta(seconds=ranks.DEADLINE_S))
        yield joined(device.torch_device, ranks.DEADLINE_S)
        dist.destroy_process_group()


def main() -> None:
    """Measure a part."""
    faulthandler.register(signal.SIGTERM, chain=True)  # print the stacks of a hung rank
    parser = argparse.ArgumentParser()
    for name in ("folder", "part", "output"):
        parser.add_argument(name)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--case", action="append", default=[])
    given = parser.parse_args()
    sys.path[:0] = [given.folder, str(Path(__file__).with_name("network"))]
    with gpu_ranks(given.gpus) if given.gpus else pinned_ranks() as group:
        figures = import_module(given.part).measure(group, given.quick, *given.case)
        if group.rank == 0:
            Path(given.output).write_text(json.dumps(figures))
        group.barrier()


if __name__ == "__main__":
    main()
