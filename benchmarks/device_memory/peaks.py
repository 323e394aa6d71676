"""Measure a rank's peak device memory with an exchange, and the largest batch that fits.

Counts PyTorch's allocations on the rank's device at the peak of two steps: model, momentum, batch,
and temporary tensors, including the exchange's buffers. Shared memory belongs to the host and does
not count; on CPU ranks, `host` gradients are therefore not views of it, as on GPUs.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from paceline.exchange.step import SGD
from paceline.exchange.synchronized import Synchronized
from paceline.links.devices import num_gpus
from paceline.links.group import Group
from paceline.measure.this_machine import Speed, this_machine
from paceline.planner.forecast import memory
from paceline.strategies import STRATEGIES
from paceline.studies.profile.largest_batch import largest
from paceline.studies.profile.memory_use import make_momentum, track
from paceline.training.recipes.named import workload_of
from trainee import Task

_STRATEGIES = ("host", "tree")
_ANY_SPEED = Speed(1e9, 1e9)  # memory does not depend on it
_NUM_STEPS = 2  # because PyTorch's first step differs from later steps
# A rank's batch, its device's memory in bytes, and the largest batch to try.
_CASES = {
    "lenet5": (64, 16 * 2**20, 4096),
    "alexnet": (16, 1536 * 2**20, 256),
    "resnet50": (8, 2048 * 2**20, 64),
}
_QUICK = (8, 3 * 2**20, 32)


def measure(group: Group, quick: bool, network: str) -> dict[str, Any]:
    """Return each rank's device memory and the largest batch, measured and predicted."""
    batch_size, limit, most = _QUICK if quick else _CASES[network]
    found: dict[str, Any] = {"batch_size": batch_size, "limit_nbytes": limit}
    for name in exchanges(group):
        predicted = needs(group, name, network)

        def fits(size: int, name: str = name) -> bool:
            return max(group.gather(peak(group, name, network, size))) <= limit

        found[name] = {
            "measured": group.gather(peak(group, name, network, batch_size)),
            "predicted": predicted(batch_size),
            "largest_batch": largest(fits, batch_size, most)[0],
            "predicted_largest": largest(lambda n, of=predicted: max(of(n)) <= limit, most, most)[
                0
            ],
        }
    return found


def exchanges(group: Group) -> tuple[str, ...]:
    """Return the strategies that these ranks and devices support.

    Ranks that share a GPU use gloo, which cannot send from GPU to GPU, as `tree` requires.
    """
    shares_gpu = group.device.type != "cpu" and group.world_size > num_gpus()
    return _STRATEGIES[:1] if shares_gpu else _STRATEGIES


def peak(group: Group, strategy: str, network: str, batch_size: int) -> int:
    """Return the peak memory of this rank's device in two steps, in bytes."""
    task = Task.synthetic(network, batch_size, group.device)
    torch.manual_seed(0)
    model, chosen = task.build(), STRATEGIES[strategy]
    optimizer = SGD(learning_rate=1e-4).optimizer(model)
    make_momentum(model, optimizer)
    method = chosen.runner().method(chosen.config(workers=group.world_size))
    as_views = strategy != "host" or group.device.type != "cpu"

    def steps() -> None:
        views = {"gradient_as_bucket_view": as_views, "init_sync": False}
        replica = Synchronized(model, method, group=group, **views)
        for _ in range(_NUM_STEPS):
            cross_entropy(replica(task.inputs), task.targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        replica.close()

    return track(steps, model, optimizer, (task.inputs, task.targets)).peak_nbytes


def needs(group: Group, strategy: str, network: str) -> Callable[[int], list[int]]:
    """Return a function from batch size to the predicted memory of each rank's device."""
    machine = this_machine(group, [_ANY_SPEED] * group.world_size)
    chosen = STRATEGIES[strategy]
    config = chosen.config(workers=group.world_size)

    def predicted(batch_size: int) -> list[int]:
        needed = memory(workload_of(network, batch_size, None), machine, chosen, config)
        return [needed[device.name] for device in machine.devices]

    return predicted
