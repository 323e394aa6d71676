"""Fixtures of tests that stay in one process."""

import pytest

from command_line import Line
from paceline.devices import simulated_tensors

# Before the first backward pass of this process, at which torch makes a thread for each device.
simulated_tensors.devices(1)


@pytest.fixture
def line(monkeypatch, capsys, tmp_path) -> Line:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return Line(monkeypatch, capsys)
