"""AlexNet: what a step takes with a small and a large batch on each rank."""

from typing import Any

import steps
from paceline.links.group import Group
from trainee import Task

_CASES = {16: (8, 3), 4: (12, 3)}  # batch of a rank: blocks, and steps in each


def measure(group: Group, quick: bool) -> dict[str, Any]:
    """Return the figures for each batch size."""
    figures = {}
    for batch_size, (num_blocks, num_steps) in {4: (2, 1)}.items() if quick else _CASES.items():
        task = Task.synthetic("alexnet", batch_size, group.device)
        wraps = steps.wraps(group, "host", "host, copied", "DDP, copied", "auto")
        case = f"AlexNet, {batch_size} images a rank"
        figures[case] = steps.measure(task, wraps, group, num_blocks, num_steps)
    return figures
