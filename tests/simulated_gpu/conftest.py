"""Fixtures for tests on simulated GPUs."""

from collections.abc import Iterator

import pytest

from simulated_gpu import instead as instead
from simulated_gpu.device import SimulatedDevice
from simulated_gpu.lent import simulated_gpus
from simulated_gpu.tensors import devices

# Autograd starts one thread per registered device in a process's first backward pass, so register
# the simulated devices before all tests.
devices(2)


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    """Yield a simulated device; raise errors of its work after the test."""
    with simulated_gpus() as (found,):
        yield found
