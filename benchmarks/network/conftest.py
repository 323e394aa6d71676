"""The program that builds two hosts on one machine."""

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from bed import can_build, hosts
from processes import Started

__all__ = ["can_build", "hosts"]
MAIN = Path(__file__).parent / "main.py"


@pytest.fixture
def main(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    """Start the test bed's main.py with these arguments, after those words if any."""
    started: list[Started] = []

    def start(*arguments: str, before: Sequence[str] = ()) -> Started:
        started.append(Started([*before, sys.executable, str(MAIN), *arguments], tmp_path))
        return started[-1]

    yield start
    for one in started:
        one.kill()
        one.process.communicate()
