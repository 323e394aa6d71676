"""Two hosts on one machine, and the program that builds them."""

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from host import missing
from hosts import Finished, TwoHosts

from processes import DEADLINE_S, Started

MAIN = Path(__file__).parents[2] / "benchmarks" / "network" / "main.py"


@pytest.fixture
def can_build() -> None:
    problem = missing()
    if problem:
        pytest.skip(problem)


@pytest.fixture
def hosts(can_build: None) -> Iterator[TwoHosts]:
    with TwoHosts(rate=None) as hosts:
        yield hosts


@pytest.fixture
def on_hosts(hosts: TwoHosts, tmp_path: Path) -> Callable[..., tuple[Finished, Finished]]:
    """Run `python PROGRAM ARGUMENTS` as so many ranks on each host, and wait for both hosts."""
    environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

    def run(per_host: int, *arguments: str) -> tuple[Finished, Finished]:
        command = [sys.executable, *arguments]
        return hosts.run(command, per_host, environment, cwd=tmp_path, deadline_s=DEADLINE_S)

    return run


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
