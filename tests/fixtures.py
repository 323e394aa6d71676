"""Fixtures that several folders' conftests give to their tests."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from processes import Finished, Started


@pytest.fixture
def start(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Started]]:
    """Start `python ARGUMENTS` in an empty folder; afterwards no process of it may be left.

    It may be started in another `folder`, which is made. Only tests marked with `gpu` see GPUs.
    """
    on_gpu = request.node.get_closest_marker("gpu") is not None
    started: list[Started] = []

    def begin(*arguments: str, afresh: bool = False, folder: Path = tmp_path) -> Started:
        folder.mkdir(exist_ok=True)
        started.append(Started([sys.executable, *arguments], folder, on_gpu, afresh))
        return started[-1]

    yield begin
    left = {pid: command for one in started for pid, command in one.members().items()}
    for one in started:
        one.kill()
        one.process.wait()
        one.close()
    assert not left, f"left running: {left}"


@pytest.fixture
def paceline(start: Callable[..., Started]) -> Callable[..., Finished]:
    """Run the command line to its end."""
    return lambda *arguments: start("-m", "paceline", *arguments).finish()
