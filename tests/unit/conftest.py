"""Fixtures of tests that stay in one process."""

import pytest

from command_line import Line


@pytest.fixture
def line(monkeypatch, capsys, tmp_path) -> Line:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return Line(monkeypatch, capsys)
