"""Time steps of AlexNet with two batch sizes, of the tiny LeNet-5, and of a rehearsed AlexNet.

The rehearsed one is on four P100: layers sleep for the times of Le et al. 2018, Table 3, with 256
images per GPU, and the exchange is real. The machine in machines/power8-p100.toml determines each
layer's share of a phase's time. The times exclude the 7 ms that the paper's exchange adds to
backward.
"""

from typing import Any

import steps
from paceline.core.cost import Roofline, Totals, compute_lane, layer_times
from paceline.links.group import Group
from paceline.records.machine_file import find_machine
from paceline.training.recipes.named import workload_of
from steps import Task

_TABLE_3 = Totals(forward_s=0.0506, backward_s=0.104, update_s=0.0051)
_ALEXNET, _LENET = "AlexNet, {} images a rank", "LeNet-5, {} images a rank"
_NAMES = ("host", "auto")
# Title; (batch per rank, blocks, steps per block); variants; DDP buckets in MB.
_CASES = {
    "alexnet": (_ALEXNET, ((16, 8, 3), (4, 12, 3)), _NAMES, (10, 25, 100)),
    "lenet5": (_LENET, ((32, 30, 100),), _NAMES, (25,)),
    "rehearsed": (f"{_ALEXNET}, rehearsed", ((256, 6, 4),), ("host", "tree"), (10, 25, 100)),
}


def measure(group: Group, quick: bool, case: str) -> dict[str, Any]:
    """Time the steps of a case with each of its batch sizes."""
    figures = {}
    title, sizes, names, buckets_mb = _CASES[case]
    for batch_size, num_blocks, num_steps in sizes[-1:] if quick else sizes:
        is_real = case != "rehearsed"
        task = Task.synthetic(case, batch_size, group.device) if is_real else _rehearsed(batch_size)
        wraps = steps.wraps(group, *names, buckets_mb=buckets_mb)
        turns = (2, 1) if quick else (num_blocks, num_steps)
        figures[title.format(batch_size)] = steps.measure(task, wraps, group, *turns)
    return figures


def _rehearsed(batch_size: int) -> Task:
    workload = workload_of("alexnet", batch_size, None)
    machine = find_machine("power8-p100")
    p100 = Roofline.of(machine).rates[compute_lane(machine.devices[0].name)]
    return Task.paced(workload, layer_times(workload, p100, _TABLE_3))
