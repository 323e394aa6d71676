"""Rehearse AlexNet on four P100: layers sleep for the paper's times, the exchange is real.

The times of the phases are from Le et al. 2018, Table 3, with 256 images per GPU. The
machine in machines/power8-p100.toml determines each layer's share of a phase's time. All variants
have the same times, which exclude the 7 ms that the paper's exchange adds to backward.
"""

from typing import Any

import steps
from paceline.core.cost import Roofline, Totals, compute_lane, layer_times
from paceline.links.group import Group
from paceline.records.machine_file import find_machine
from paceline.training.recipes.named import workload_of
from steps import Task

_BATCH_SIZE = 256
_TABLE_3 = Totals(forward_s=0.0506, backward_s=0.104, update_s=0.0051)
_NUM_BLOCKS, _NUM_STEPS = 6, 4


def measure(group: Group, quick: bool) -> dict[str, Any]:
    """Time steps of the rehearsed model with each variant."""
    workload = workload_of("alexnet", _BATCH_SIZE, None)
    machine = find_machine("power8-p100")
    p100 = Roofline.of(machine).rates[compute_lane(machine.devices[0].name)]
    task = Task.paced(workload, layer_times(workload, p100, _TABLE_3))
    num_blocks, num_steps = (2, 2) if quick else (_NUM_BLOCKS, _NUM_STEPS)
    wraps = steps.wraps(group, "host", "tree")
    case = f"AlexNet, {_BATCH_SIZE} images a rank, rehearsed"
    return {case: steps.measure(task, wraps, group, num_blocks, num_steps)}
