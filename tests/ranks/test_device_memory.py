"""Buffers that exchanges have on a device, counted by PyTorch and beside the plans' bytes."""

import pytest
import torch
from torch import nn

from boxes import box, chain, link
from paceline.core.workload import replica_nbytes
from paceline.exchange.step import SGD
from paceline.exchange.synchronized import Synchronized
from paceline.links.rendezvous import process_group
from paceline.planner.forecast import memory
from paceline.strategies import STRATEGIES
from paceline.studies.profile.memory_use import make_momentum, track
from pair import Ranks

NBYTES = 4000  # of gradients
SIZE = 1000  # of two layers: inputs and outputs of one sample are next to nothing


def buffers(name: str, kind: str, workers: int) -> list[float]:
    """Return what a plan has beside a replica on each device, in gradients of the model."""
    devices = [f"{kind}{i}" for i in range(workers)]
    links = [link(one, "h", 1e9) for one in devices]
    machine, work = box(*[kind] * workers, links=links), chain((1.0, NBYTES))
    strategy = STRATEGIES[name]
    needed = memory(work, machine, strategy, strategy.config(workers=workers))
    return [(needed[device] - replica_nbytes(work)) / NBYTES for device in devices]


def counted(name: str) -> float:
    """What PyTorch allocates in two steps, in gradients of the model beside a replica."""
    with process_group(60.0) as group:
        model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE))
        optimizer = SGD(learning_rate=1e-4).optimizer(model)
        make_momentum(model, optimizer)
        strategy, inputs = STRATEGIES[name], torch.zeros(1, SIZE)
        method = strategy.runner().method(strategy.config(workers=group.world_size))

        def steps() -> None:
            # On cores gradients of host could be views of the host's memory; not on a GPU.
            views = {"gradient_as_bucket_view": method.name == "tree", "init_sync": False}
            replica = Synchronized(model, method, group=group, **views)
            for _ in range(2):
                replica(inputs).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            replica.close()

        peak = track(steps, model, optimizer, inputs).peak_nbytes
        # Without parameters, momentum and gradients.
        return peak / sum(one.nbytes for one in model.parameters()) - 3


@pytest.mark.parametrize("name", ["host", "tree"])
def test_devices_hold_what_plans_say(pair: Ranks, name: str):
    found = pair(counted, name, group=False)
    assert found == pytest.approx(buffers(name, "cpu", 2), abs=0.05)


def test_plans_have_the_buffers_of_a_gpu_and_of_parents():
    # A GPU gathers its gradients for the host; a tree has them in a buffer, and parents a second.
    assert buffers("host", "cpu", 4) == [0, 0, 0, 0]
    assert buffers("host", "gpu", 4) == [1, 1, 1, 1]
    assert buffers("tree", "cpu", 4) == buffers("tree", "gpu", 4) == [2, 1, 2, 1]
    assert buffers("host", "gpu", 1) == buffers("tree", "gpu", 1) == [0]
