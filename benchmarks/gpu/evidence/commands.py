"""Paceline's command line, as a part runs it."""

import json
import sys
from typing import Any

from part import Part, PartFailedError

from paceline.links.processes import output

_DEADLINE_S = 600.0  # the part's own is shorter


def paceline(*arguments: str) -> dict[str, Any]:
    """Run a command in this folder and return its JSON. RuntimeError with its error if it fails."""
    done = output([sys.executable, "-m", "paceline", *arguments, "--json"], _DEADLINE_S)
    sys.stderr.write(done.stderr)
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:]
        raise RuntimeError(f"paceline {arguments[0]} ended with {done.returncode}: {''.join(last)}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def require_gpu(part: Part, facts: dict[str, Any]) -> None:
    """Raise PartFailedError if a result's facts name another device than the first GPU."""
    if (device := facts["device"]) != part.device.name:
        raise PartFailedError(f"it was measured on {device!r}, not on {part.device.name!r}")
