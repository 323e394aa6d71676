"""AlexNet on four P100, rehearsed: layers sleep as long as they took there, the exchange is real.

The times of the phases are those of Le et al. 2018, Table 3, with 256 images a GPU; the layers
share them as the machine of machines/power8-p100.toml would. They hold for all variants alike: the
7 ms that the paper's own exchange adds to backward are not among them.
"""

from pathlib import Path
from typing import Any

import torch

import steps
from paceline.core.cost import LayerTimes, Rate, Roofline, Totals, compute_lane, layer_times
from paceline.core.workload import Workload
from paceline.links.group import Group
from paceline.records.machine_file import read_machine
from paceline.training.models import describe, find
from paceline.training.models.paced import PacedModel, PacedSGD
from trainee import Task

_MACHINE = Path(__file__).parents[2] / "machines" / "power8-p100.toml"
_BATCH_SIZE = 256
_TABLE_3 = Totals(forward_s=0.0506, backward_s=0.104, update_s=0.0051)
_NUM_BLOCKS, _NUM_STEPS = 6, 4


def measure(group: Group, quick: bool) -> dict[str, Any]:
    """Return the figures."""
    workload = described("alexnet", _BATCH_SIZE)
    task = rehearsal(workload, layer_times(workload, p100(), _TABLE_3))
    num_blocks, num_steps = (2, 2) if quick else (_NUM_BLOCKS, _NUM_STEPS)
    wraps = steps.wraps(group, "host", "tree")
    case = f"AlexNet, {_BATCH_SIZE} images a rank, rehearsed"
    return {case: steps.measure(task, wraps, group, num_blocks, num_steps)}


def described(name: str, batch_size: int) -> Workload:
    """Return the workload of a built-in model."""
    architecture = find(name)
    with torch.device("meta"):
        model = architecture.build(None)
        batch = torch.empty(batch_size, *architecture.input_shape or ())
    return describe(model, batch, name)


def p100() -> Rate:
    """Return how fast the paper's GPUs compute."""
    machine = read_machine(_MACHINE)
    return Roofline.of(machine).rates[compute_lane(machine.devices[0].name)]


def rehearsal(workload: Workload, times: LayerTimes) -> Task:
    """Return what trains a stand-in that takes these times."""

    def optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
        assert isinstance(model, PacedModel)
        return PacedSGD(model.parameters(), model.update_s)

    return Task(
        build=lambda: PacedModel(workload, *times),
        optimizer=optimizer,
        inputs=torch.zeros(1, 1),
        targets=torch.zeros(1, dtype=torch.int64),
    )
