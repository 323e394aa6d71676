"""Fixtures of tests on the simulated GPU."""

from collections.abc import Iterator

import pytest

from pair import Ranks
from simulated_gpu import instead as instead
from simulated_gpu.device import SimulatedDevice
from simulated_gpu.lent import simulated_gpus
from simulated_gpu.tensors import devices

# Autograd starts its threads, one for each device that torch knows, with a process's first backward
# pass: so torch gets to know the simulated devices before any test.
devices(2)


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    """A simulated device, on which nothing has failed."""
    with simulated_gpus() as (found,):
        yield found


@pytest.fixture(scope="package")
def gpu_pair() -> Iterator[Ranks]:
    """Two ranks as `pair`, which know the simulated devices before their first backward pass."""
    ranks = Ranks(2)
    yield ranks
    ranks.close()
