"""Fixtures of whole runs."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from processes import Finished


@pytest.fixture
def outcome(paceline: Callable[..., Finished]) -> Callable[..., dict[str, Any]]:
    """Run a command to its end, and return the result that it prints."""

    def run(*arguments: str) -> dict[str, Any]:
        done = paceline(*arguments, "--json")
        assert done.code == 0, done.err
        result: dict[str, Any] = json.loads(done.out)
        return result

    return run
