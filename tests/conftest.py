"""Settings of all tests, and shared fixtures."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

from fixtures import paceline, start
from processes import SHARED_SERVER, fork_server

__all__ = ["paceline", "start"]

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


def _ranks(world_size: int, **options: int) -> Iterator[Any]:
    from pair import Ranks  # imports torch, which tests/pure does not need

    ranks = Ranks(world_size, **options)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def pair() -> Iterator[Any]:
    """Two ranks to which tests send functions: see pair.py."""
    yield from _ranks(2)


@pytest.fixture(scope="session")
def pair_on_gpus() -> Iterator[Any]:
    """Two ranks, each with a simulated GPU: see pair.py."""
    yield from _ranks(2, num_gpus=2)


@pytest.fixture(scope="session")
def triple() -> Iterator[Any]:
    """Three ranks to which tests send functions: see pair.py."""
    yield from _ranks(3)


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Any]:
    """Four ranks to which tests send functions: see pair.py."""
    yield from _ranks(4)
