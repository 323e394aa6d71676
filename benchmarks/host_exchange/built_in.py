"""Time steps of built-in models: AlexNet with two batch sizes, and the tiny LeNet-5."""

from typing import Any

import steps
from paceline.links.group import Group
from steps import Task

# Name; (batch per rank, blocks, steps per block); DDP buckets in MB, any of which holds LeNet-5.
_CASES = {
    "alexnet": ("AlexNet", ((16, 8, 3), (4, 12, 3)), (10, 25, 100)),
    "lenet5": ("LeNet-5", ((32, 30, 100),), (25,)),
}


def measure(group: Group, quick: bool, model: str) -> dict[str, Any]:
    """Time the steps of a model with each of its batch sizes."""
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
