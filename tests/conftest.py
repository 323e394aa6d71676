"""Fixtures of tests that start whole commands."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from processes import SHARED_SERVER, Finished, Started, fork_server

# An example takes as long as the machine lets it: time is nothing that a test fails for.
settings.register_profile("all", deadline=None)
settings.register_profile("quick", deadline=None, max_examples=25)
SLOW_S = 600.0  # for a slow test that hangs
# A shell that runs the tests in the background has them, and all that they start, ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Choose the number of examples; open the fork server of processes that share the tests."""
    settings.load_profile("quick" if "not slow" in config.option.markexpr else "all")
    if getattr(config.option, "numprocesses", None):
        os.environ[SHARED_SERVER] = fork_server()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_S))


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
