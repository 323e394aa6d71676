"""Fixtures of tests that run in one process."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from command_line import Line
from simulated_gpu import instead as instead
from simulated_gpu.device import SimulatedDevice
from simulated_gpu.lent import simulated_gpus
from simulated_gpu.tensors import devices

# The first backward pass of a process starts one autograd thread for each known device, so register
# the simulated device before any test.
devices(1)


@pytest.fixture
def line(monkeypatch, capsys, tmp_path) -> Line:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return Line(monkeypatch, capsys)


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    """Yield a simulated GPU without delays; raise what failed on it."""
    with simulated_gpus() as (found,):
        found.delays = lambda stream, what: 0.0
        yield found


@pytest.fixture
def own_modules(tmp_path: Path, monkeypatch) -> Iterator[Callable[..., None]]:
    """Write user modules into the current directory; unload them after the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    known = set(sys.modules)

    def write(**sources: str) -> None:
        for name, source in sources.items():
            path = tmp_path / f"{name.replace('.', '/')}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(source)

    yield write
    for name in [one for one in sys.modules.keys() - known if one.startswith("own_")]:
        del sys.modules[name]
