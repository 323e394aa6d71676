"""What a step of a built-in model takes: AlexNet with two batches, and LeNet-5, over in no time."""

from typing import Any

import steps
from paceline.links.group import Group
from trainee import Task

# Batch of a rank, blocks, steps in each, and sizes of buckets: any takes LeNet-5's 0.25 MB.
_CASES = {
    "alexnet": ("AlexNet", ((16, 8, 3), (4, 12, 3)), (10, 25, 100)),
    "lenet5": ("LeNet-5", ((32, 30, 100),), (25,)),
}


def measure(group: Group, quick: bool, model: str) -> dict[str, Any]:
    """Return the figures for each batch size."""
    figures = {}
    name, cases, buckets_mb = _CASES[model]
    for batch_size, num_blocks, num_steps in cases[-1:] if quick else cases:
        task = Task.synthetic(model, batch_size, group.device)
        named = ("host", "host, copied", "DDP, copied", "auto")
        wraps = steps.wraps(group, *named, buckets_mb=buckets_mb)
        turns = (2, 1) if quick else (num_blocks, num_steps)
        case = f"{name}, {batch_size} images a rank"
        figures[case] = steps.measure(task, wraps, group, *turns)
    return figures
