"""Time sums of float32 gradients by the arena, gloo and OpenMPI."""

import json
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline.links.arena import Arena
from paceline.links.group import Group
from ranks import DEADLINE_S, Variant, alternate, compare, cpu_of, timed, unpinned
from steps import exchanging

_LARGE, _SMALL = 60_000_000, 60_000  # numbers of values: about AlexNet and LeNet-5
_NUM_BLOCKS, _NUM_SUMS = 12, {_LARGE: 5, _SMALL: 200}
_HERE = Path(__file__).parent
_MPI = _HERE.parents[1] / "build" / "mpi" / "bin"  # a virtual environment of its own


def measure(group: Group, quick: bool) -> dict[str, Any]:
    """Time a large sum and, with two ranks, a small sum."""
    counts = (_LARGE, _SMALL) if group.world_size == 2 else (_LARGE,)
    return {f"{count:,} float32": _case(count, group, quick) for count in counts}


def _case(count: int, group: Group, quick: bool) -> dict[str, Any]:
    arena = Arena(group, 4 * count, max_chunks=1, num_flags=0, deadline_s=DEADLINE_S)
    arena.set_chunks([[(0, count, torch.float32)]])
    arena.slot.view(torch.float32).fill_(group.rank + 1)
    gradients = torch.zeros(count)
    everyone = group.world_size
    variants = [
        Variant("arena", timed(exchanging(arena), 1), everyone),
        Variant("gloo", timed(lambda: dist.all_reduce(gradients), 1), everyone),
    ]
    if (_MPI / "mpirun").exists():
        variants.append(Variant("openmpi", partial(_openmpi, everyone, count), 1))
    num_blocks, num_sums = (2, 3) if quick else (_NUM_BLOCKS, _NUM_SUMS[count])
    blocks = alternate(variants, group, num_blocks, num_sums)
    for parity in (0, 1):
        means = arena.shared_result(parity).view(torch.float32)
        if not bool((means[:count] == (everyone + 1) / 2).all()):
            raise RuntimeError("the arena's result is not the mean of the ranks' values")
    arena.close()
    return {} if group.rank else compare(blocks, "arena")


def _openmpi(num_ranks: int, count: int, num_times: int) -> list[float]:
    """Time sums on OpenMPI ranks, which our rank 0 starts; return its rank 0's seconds."""
    # Ranks pin themselves, because mpirun would not bind two ranks to one core.
    cpus = [str(cpu_of(rank)) for rank in range(num_ranks)]
    launcher = [str(_MPI / "mpirun"), "--allow-run-as-root", "--oversubscribe"]
    program = [str(_MPI / "python"), str(_HERE / "mpi_rank.py"), str(count), str(num_times), *cpus]
    command = [*launcher, "--listen-to", "none", "-n", str(num_ranks), *program]
    with unpinned():
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    seconds: list[float] = json.loads(done.stdout)
    return seconds
