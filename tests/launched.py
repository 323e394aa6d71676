"""Programs of tests that run as several ranks of this machine, and what they say."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from processes import Finished, Started

PROGRAMS = Path(__file__).parent / "multiprocess" / "programs"
LAUNCH = """
import sys
from paceline.links.launch import launch
launch([sys.executable, *sys.argv[2:]], int(sys.argv[1]))
"""

# What gloo says when it loses a connection between ranks that have just begun, which is rare and
# none of our doing: the program may begin again.
GLOO_LOST = "Gloo connectFullMesh failed"
ATTEMPTS = 3

Found = dict[str, list[Any]]  # of each case what came of it, rank by rank


def output(
    folder: Path, num_ranks: int, program: str, *arguments: str, before: Sequence[str] = ()
) -> str:
    """Run a program to its end, `before` in front of its command line; return what it has printed.

    Afterwards none of its processes is left.
    """
    command = [sys.executable, "-c", LAUNCH, str(num_ranks), str(PROGRAMS / program), *arguments]
    for _ in range(ATTEMPTS):
        done = _finished([*before, *command], folder)
        if GLOO_LOST not in done.err:
            break
    assert done.code == 0, done.err
    return done.out


def _finished(command: list[str], folder: Path) -> Finished:
    started = Started(command, folder)
    try:
        done = started.finish(200)
        assert done.code != 0 or not started.members()
    finally:
        started.kill()
    return done


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
