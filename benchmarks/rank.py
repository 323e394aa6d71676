"""One rank of a part: joins the others, measures, and leaves its figures if it is the first.

Started in the environment that Paceline's launcher makes, for a part that is a module in FOLDER:

    rank.py FOLDER PART OUTPUT [--quick] [--gpu]
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist

import ranks
from paceline.links.group import Group, joined, process_group


@contextmanager
def pinned_ranks() -> Iterator[Group]:
    """Join the others on the CPU: one core and one thread."""
    ranks.pin()
    torch.set_num_threads(1)
    with process_group(ranks.DEADLINE_S) as group:
        yield group


@contextmanager
def gpu_ranks() -> Iterator[Group]:
    """Join the others on a GPU of this rank's own, or on a shared one if there are too few."""
    rank, num_ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    num_gpus = torch.cuda.device_count()
    device = torch.device("cuda", rank % num_gpus)
    torch.cuda.set_device(device)
    backend = "nccl" if num_gpus >= num_ranks else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=ranks.DEADLINE_S))
    yield joined(device, ranks.DEADLINE_S)
    dist.destroy_process_group()


def main() -> None:
    """Measure a part."""
    folder, part, output, *options = sys.argv[1:]
    sys.path.insert(0, folder)
    with gpu_ranks() if "--gpu" in options else pinned_ranks() as group:
        figures = import_module(part).measure(group, "--quick" in options)
        if group.rank == 0:
            Path(output).write_text(json.dumps(figures))
        group.barrier()


if __name__ == "__main__":
    main()
