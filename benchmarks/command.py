"""Run Paceline's command line from a benchmark."""

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

DEADLINE_S = 7200.0


def paceline(
    *words: object, cwd: Path | None = None, hosts: Any = None, deadline_s: float = DEADLINE_S
) -> dict[str, Any]:
    """Run a command here or as a rank on each host; return its --json output.

    Deletes the run folder unless --output is given. RuntimeError if the command fails.
    """
    with TemporaryDirectory() as folder:
        output = () if words[0] == "plan" or "--output" in words else ("--output", folder)
        command = [sys.executable, "-m", "paceline", *map(str, (*words, *output)), "--json"]
        if hosts is not None:
            found = hosts.checked(command, cores=(0, 1), cwd=cwd, deadline_s=deadline_s)
        else:
            done = subprocess.run(
                command, cwd=cwd, capture_output=True, text=True, timeout=deadline_s, check=False
            )
            if done.returncode:
                raise RuntimeError(f"paceline {words[0]}: {done.returncode}\n{done.stderr}")
            found = done.stdout
    return json.loads(found)
