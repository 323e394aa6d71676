"""The same with gradients on GPUs; writes gpu.json.

    python benchmarks/host_exchange/gpu.py [--quick]

Two ranks, each on a GPU of its own; on a machine with one GPU they share it. NCCL refuses two ranks
on one GPU, so that there gloo is all that there is to compare with. Without a GPU it ends with exit
code 2.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import steps  # noqa: E402
import tables  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import ranks  # noqa: E402
from paceline.exchange.replicas import prober  # noqa: E402
from paceline.links.group import Group  # noqa: E402
from paceline.measure.this_machine import facts  # noqa: E402
from paceline.strategies import STRATEGIES  # noqa: E402
from paceline.strategies.host.config import HostReduce  # noqa: E402
from trainee import Task, synchronizer  # noqa: E402

_NUM_RANKS = 2
_SUMS = {60_000_000: (8, 5), 60_000: (12, 100)}  # values: blocks, and sums in each
_STEPS = {("alexnet", 64): (8, 10), ("alexnet", 16): (8, 20), ("lenet5", 32): (12, 100)}


def measure(group: Group, quick: bool) -> dict[str, Any]:
    """Return the figures of both parts."""
    sums = {
        f"{count:,} float32": _sums(count, group, *((2, 2) if quick else size))
        for count, size in _SUMS.items()
    }
    cases = {}
    for (name, batch_size), size in _STEPS.items():
        task = Task.synthetic(name, batch_size, group.device)
        wraps = steps.wraps(group, "host", "auto")
        num_blocks, num_steps = (2, 2) if quick else size
        case = f"{name}, {batch_size} images a rank"
        cases[case] = steps.measure(task, wraps, group, num_blocks, num_steps)
    return {"gpu sums": sums, "gpu steps": cases}


def _sums(count: int, group: Group, num_blocks: int, num_sums: int) -> dict[str, Any]:
    """Return the figures of a sum: through the arena, by torch's backend, and by gloo."""
    gradients = torch.zeros(count, device=group.device)
    config = HostReduce(workers=group.world_size)
    probe = prober(STRATEGIES["host"], config, group).make([[4 * count]])
    ways: dict[str, Callable[[], object]] = {
        "arena": probe,
        dist.get_backend(): lambda: dist.all_reduce(gradients),
    }
    ways.setdefault("gloo", lambda: dist.all_reduce(gradients, group=group.control))
    synchronize = synchronizer(group.device)
    variants = [
        ranks.Variant(name, ranks.timed(way, 2, synchronize), group.world_size)
        for name, way in ways.items()
    ]
    blocks = ranks.alternate(variants, group, num_blocks, num_sums)
    probe.close()
    return ranks.compare(blocks, "arena") if group.rank == 0 else {}


def main() -> None:
    """Measure, print the tables, and write gpu.json."""
    if not torch.cuda.is_available():
        print("gpu.py: there is no CUDA device here, so nothing is measured", file=sys.stderr)
        sys.exit(2)
    quick = "--quick" in sys.argv
    parts = ranks.on_ranks(HERE, "gpu", _NUM_RANKS, quick, on_gpu=True)
    shared = torch.cuda.device_count() < _NUM_RANKS
    where = f"{_NUM_RANKS} ranks on {'one GPU' if shared else 'a GPU each'}"
    figures = {part: {where: content} for part, content in parts.items()}
    for part, by_ranks in figures.items():
        print(f"\n{tables.of(part, by_ranks)}", flush=True)
    if not quick:
        content = {"machine": facts(torch.device("cuda", 0)), "figures": figures}
        (HERE / "gpu.json").write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
