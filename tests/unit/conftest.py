"""Fixtures of tests that stay in one process."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from command_line import Line
from simulated_gpu import instead as instead
from simulated_gpu.tensors import devices

# Autograd starts its threads, one for each device that torch knows, with a process's first backward
# pass: so torch gets to know the simulated device before any test.
devices(1)


@pytest.fixture
def line(monkeypatch, capsys, tmp_path) -> Line:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return Line(monkeypatch, capsys)


@pytest.fixture
def own_modules(tmp_path: Path, monkeypatch) -> Iterator[Callable[..., None]]:
    """Write a user's modules into the current directory; they leave no trace in this process."""
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
