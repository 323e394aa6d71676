"""Provide pytest fixtures that build two hosts."""

from collections.abc import Iterator

import pytest
from host import missing
from hosts import TwoHosts


@pytest.fixture
def can_build() -> None:
    """Skip the test if this machine or user cannot build two hosts."""
    problem = missing()
    if problem:
        pytest.skip(problem)


@pytest.fixture
def hosts(can_build: None) -> Iterator[TwoHosts]:
    """Build two hosts that are joined by an unshaped wire."""
    with TwoHosts(rate=None) as built:
        yield built
