"""Buffers that exchanges have on a device, counted by PyTorch and beside the plans' bytes."""

import json

import pytest

from boxes import box, chain, link
from launched import output
from paceline.core.workload import replica_nbytes
from paceline.planner.forecast import memory
from paceline.strategies import STRATEGIES

NBYTES = 4000  # of gradients


def buffers(name: str, kind: str, workers: int) -> list[float]:
    """Return what a plan has beside a replica on each device, in gradients of the model."""
    devices = [f"{kind}{i}" for i in range(workers)]
    links = [link(one, "h", 1e9) for one in devices]
    machine, work = box(*[kind] * workers, links=links), chain((1.0, NBYTES))
    strategy = STRATEGIES[name]
    needed = memory(work, machine, strategy, strategy.config(workers=workers))
    return [(needed[device] - replica_nbytes(work)) / NBYTES for device in devices]


@pytest.fixture(scope="module")
def counted(tmp_path_factory) -> dict[str, list[float]]:
    return json.loads(output(tmp_path_factory.mktemp("memory"), 2, "exchange_memory.py"))


@pytest.mark.parametrize("name", ["host", "tree"])
def test_devices_hold_what_plans_say(counted, name):
    assert counted[name] == pytest.approx(buffers(name, "cpu", 2), abs=0.05)


def test_plans_have_the_buffers_of_a_gpu_and_of_parents():
    # A GPU gathers its gradients for the host; a tree has them in a buffer, and parents a second.
    assert buffers("host", "cpu", 4) == [0, 0, 0, 0]
    assert buffers("host", "gpu", 4) == [1, 1, 1, 1]
    assert buffers("tree", "cpu", 4) == buffers("tree", "gpu", 4) == [2, 1, 2, 1]
    assert buffers("host", "gpu", 1) == buffers("tree", "gpu", 1) == [0]
