"""LeNet-5: what an exchange adds to a step that is over in milliseconds."""

from typing import Any

import steps
from paceline.links.group import Group
from trainee import Task

_BATCH_SIZE, _NUM_BLOCKS, _NUM_STEPS = 32, 30, 100


def measure(group: Group, quick: bool) -> dict[str, Any]:
    """Return the figures."""
    task = Task.synthetic("lenet5", _BATCH_SIZE, group.device)
    num_blocks, num_steps = (2, 20) if quick else (_NUM_BLOCKS, _NUM_STEPS)
    # All of its gradients are 0.25 MB: any bucket takes them.
    wraps = steps.wraps(group, "host", "host, copied", "DDP, copied", "auto", buckets_mb=(25,))
    case = f"LeNet-5, {_BATCH_SIZE} images a rank"
    return {case: steps.measure(task, wraps, group, num_blocks, num_steps)}
