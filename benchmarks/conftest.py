"""Configure the tests of the benchmarks' own code, which only `make test-all` runs."""

from pathlib import Path

import pytest

from fixtures import paceline, start

__all__ = ["paceline", "start"]
HERE = Path(__file__).parent
LONGEST_S = 600.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE) and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LONGEST_S))
