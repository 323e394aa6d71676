"""Measure a rank's peak device memory with an exchange, and the largest batch that fits.

Counts PyTorch's allocations at the peak of two steps: model, momentum, batch, and temporary
tensors, including the exchange's buffers. Shared memory belongs to the host and does not count;
`host` gradients are therefore not views of it, as on GPUs.
"""

from typing import Any

import torch
from torch.nn.functional import cross_entropy

from paceline.core.cost import Rate
from paceline.exchange.synchronized import Synchronized
from paceline.links.group import Group
from paceline.measure.this_machine import this_machine
from paceline.planner.forecast import memory
from paceline.strategies import STRATEGIES
from paceline.studies.profile.largest_batch import largest
from paceline.studies.profile.memory_use import make_momentum, track
from paceline.training.recipes.named import workload_of
from steps import Task

_ANY_SPEED = Rate(1e9, 1e9)  # memory does not depend on it
_NUM_STEPS = 2  # because PyTorch's first step differs from later steps
# A rank's batch, its device's memory in bytes, and the largest batch to try.
_CASES = {"lenet5": (64, 16 * 2**20, 4096), "alexnet": (16, 1536 * 2**20, 256)}
_QUICK = (8, 3 * 2**20, 32)


def measure(group: Group, quick: bool, network: str) -> dict[str, Any]:
    """Return each rank's device memory and the largest batch, measured and predicted."""
    batch_size, limit, most = _QUICK if quick else _CASES[network]
    found: dict[str, Any] = {"batch_size": batch_size, "limit_nbytes": limit}
    machine = this_machine(group, [_ANY_SPEED] * group.world_size)
    for name in ("host", "tree"):
        strategy = STRATEGIES[name]
        config = strategy.config(workers=group.world_size)

        def predicted(size: int, strategy: Any = strategy, config: Any = config) -> list[int]:
            needed = memory(workload_of(network, size, None), machine, strategy, config)
            return [needed[device.name] for device in machine.devices]

        def measured(size: int, name: str = name) -> list[int]:
            return group.gather(_peak(group, name, network, size))

        fitting, planned = (
            largest(lambda size, of=of: max(of(size)) <= limit, start, most)[0]
            for of, start in ((measured, batch_size), (predicted, most))
        )
        found[name] = {
            "measured": measured(batch_size),
            "predicted": predicted(batch_size),
            "largest_batch": fitting,
            "predicted_largest": planned,
        }
    return found


def _peak(group: Group, name: str, network: str, batch_size: int) -> int:
    """Return the peak memory of this rank's device in two steps, in bytes."""
    task = Task.synthetic(network, batch_size, group.device)
    torch.manual_seed(0)
    model, strategy = task.build(), STRATEGIES[name]
    optimizer = torch.optim.SGD(model.parameters(), 1e-4, momentum=0.9)
    make_momentum(model, optimizer)
    method = strategy.runner().method(strategy.config(workers=group.world_size))

    def steps() -> None:
        views = {"gradient_as_bucket_view": name != "host", "init_sync": False}
        replica = Synchronized(model, method, group=group, **views)
        for _ in range(_NUM_STEPS):
            cross_entropy(replica(task.inputs), task.targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        replica.close()

    return track(steps, model, optimizer, (task.inputs, task.targets)).peak_nbytes
