"""A part of a benchmark that a rank on each of two hosts measures together."""

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hosts import TwoHosts

from ranks import DEADLINE_S

_PROGRAM = Path(__file__).parents[1] / "rank.py"


def on_hosts(
    hosts: TwoHosts, folder: Path, part: str, quick: bool, cases: Sequence[str] = ()
) -> dict[str, Any]:
    """Run a part, a module of that folder, on one core of each host; return rank 0's figures.

    `cases` are handed to the part's `measure`. Exits with what the ranks wrote if one fails.
    """
    with tempfile.TemporaryDirectory() as temporary:
        output = Path(temporary) / "figures.json"
        command = [sys.executable, str(_PROGRAM), str(folder), part, str(output)]
        command += [f"--case={case}" for case in cases] + (["--quick"] if quick else [])
        finished = hosts.run(command, cores=(0, 1), cwd=folder, deadline_s=10 * DEADLINE_S)
        if any(one.code for one in finished):
            sys.exit("\n".join(one.err for one in finished))
        figures: dict[str, Any] = json.loads(output.read_text())
    return figures
