"""Fixtures that the conftests of several folders import."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from processes import Finished, Started


@pytest.fixture
def start(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Started]]:
    """Start `python ARGUMENTS` in `folder`, and fail if a process is left after the test.

    Only tests marked with `gpu` see GPUs. `afresh`: do not fork from the fork server.
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
    """Run a command of the command line until it ends."""
    return lambda *arguments: start("-m", "paceline", *arguments).finish()
