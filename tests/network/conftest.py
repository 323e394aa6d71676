"""Fixtures for tests on two hosts, which are network namespaces of this machine."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hosts import Finished, TwoHosts

from processes import DEADLINE_S


@pytest.fixture
def on_hosts(hosts: TwoHosts, tmp_path: Path) -> Callable[..., tuple[Finished, Finished]]:
    """Run `python ARGUMENTS` as `per_host` ranks on each host, and wait for both hosts."""
    environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

    def run(per_host: int, *arguments: str) -> tuple[Finished, Finished]:
        command = [sys.executable, *arguments]
        return hosts.run(command, per_host, environment, cwd=tmp_path, deadline_s=DEADLINE_S)

    return run
