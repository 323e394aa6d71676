"""Settings of all tests, and shared fixtures."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from processes import SHARED_SERVER, Finished, Started, fork_server

# No test fails for being slow, so examples have no deadline.
settings.register_profile("all", deadline=None)
settings.register_profile("quick", deadline=None, max_examples=25)
SLOW_S = 600.0  # timeout of slow tests
# A background shell makes the tests and their child processes ignore Ctrl-C; undo this.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Choose the number of examples; open a fork server for all processes of the test run."""
    settings.load_profile("quick" if "not slow" in config.option.markexpr else "all")
    if getattr(config.option, "numprocesses", None):
        os.environ[SHARED_SERVER] = fork_server()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_S))


def _ranks(world_size: int, **options: int) -> Any:
    """Return a fixture of ranks to which tests send functions: see pair.py."""

    @pytest.fixture(scope="session")
    def ranks() -> Iterator[Any]:
        from pair import Ranks  # imports torch, which tests/pure does not need

        found = Ranks(world_size, **options)
        yield found
        found.close()

    return ranks


pair, triple, four_ranks = map(_ranks, (2, 3, 4))
pair_on_gpus = _ranks(2, num_gpus=2)  # each rank has a simulated GPU


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


@pytest.fixture
def ranks(request: pytest.FixtureRequest, place: str) -> Any:
    """Return the ranks at a test's `place`: pair, triple, or pair_on_gpus."""
    return request.getfixturevalue(place)


@pytest.fixture
def can_build() -> None:
    """Skip the test if this machine or user cannot build two hosts."""
    from host import missing

    if problem := missing():
        pytest.skip(problem)


@pytest.fixture
def hosts(can_build: None) -> Iterator[Any]:
    """Build two hosts that are joined by an unshaped wire."""
    from hosts import TwoHosts

    with TwoHosts(rate=None) as built:
        yield built
