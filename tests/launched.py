"""Programs of tests that run as several ranks of this machine, and what they say."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from processes import Started

PROGRAMS = Path(__file__).parent / "multiprocess" / "programs"
LAUNCH = """
import sys
from paceline.links.launch import launch
launch([sys.executable, *sys.argv[2:]], int(sys.argv[1]))
"""

Found = dict[str, list[Any]]  # of each case what came of it, rank by rank


def output(
    folder: Path, num_ranks: int, program: str, *arguments: str, before: Sequence[str] = ()
) -> str:
    """Run a program to its end, `before` in front of its command line; return what it has printed.

    Afterwards none of its processes is left.
    """
    command = [sys.executable, "-c", LAUNCH, str(num_ranks), str(PROGRAMS / program), *arguments]
    started = Started([*before, *command], folder)
    try:
        done = started.finish(200)
        assert done.code == 0, done.err
        assert not started.members()
    finally:
        started.kill()
    return done.out


def run(folder: Path, num_ranks: int, program: str, *arguments: str) -> Found:
    """Run a program of cases to its end, and return what came of them."""
    return found_in(output(folder, num_ranks, program, *arguments))


def found_in(out: str) -> Found:
    """Return what the cases have printed."""
    return {name: outcomes for _, name, outcomes in map(json.loads, out.splitlines())}


def same(outcomes: list[Any]) -> Any:
    """Return what all ranks have found alike."""
    assert not [one["error"] for one in outcomes if isinstance(one, dict) and "error" in one]
    for outcome in outcomes:
        assert outcome == outcomes[0]
    return outcomes[0]
