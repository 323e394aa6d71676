"""Fixtures of tests that build two hosts."""

from collections.abc import Iterator

import pytest
from host import missing
from hosts import TwoHosts


@pytest.fixture
def can_build() -> None:
    """Skip where two hosts cannot be built on this machine."""
    problem = missing()
    if problem:
        pytest.skip(problem)


@pytest.fixture
def hosts(can_build: None) -> Iterator[TwoHosts]:
    """Two hosts on this machine, with a wire between them."""
    with TwoHosts(rate=None) as built:
        yield built
