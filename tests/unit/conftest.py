"""Fixtures of tests that stay in one process."""

import pytest

from command_line import Line
from paceline.devices.simulated_tensors import devices

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
