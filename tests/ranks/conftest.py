"""Fixtures for tests on ranks."""

import pytest

from pair import Ranks


@pytest.fixture
def ranks(request: pytest.FixtureRequest, place: str) -> Ranks:
    """The ranks at a test's `place`: pair, triple, or pair_on_gpus."""
    found: Ranks = request.getfixturevalue(place)
    return found
