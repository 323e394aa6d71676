"""Named places at which a test makes a fault happen.

    reach("step.done", worker=1, step=12)      # in the code: does nothing unless a test armed it

A test arms failpoints in the environment, which all processes of a run inherit:

    PACELINE_FAILPOINTS='[{"at": "step.done", "worker": 1, "step": 12, "do": "SIGKILL"}]'

Every other key of a failpoint must equal what the code passes under that name; `visit` counts the
matching visits of this process from 1. `do` is a signal that the process sends itself ("SIGKILL",
"SIGSTOP") or, after "parent:", its parent; "raise", for an OSError; or "pause:FOLDER", which waits
until the test lets it go on (`Pause` in tests/faults.py).
"""

import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

ARMED = "PACELINE_FAILPOINTS"
REACHED, GO_ON = "reached", "go_on"  # FIFOs in the folder of a pause
_visits: Counter[str] = Counter()


def reach(name: str, **where: Any) -> None:
    """Do what a test has armed at this place, if anything."""
    armed = os.environ.get(ARMED)
    if not armed:
        return
    for failpoint in json.loads(armed):
        conditions = dict(failpoint)
        action, at, visit = conditions.pop("do"), conditions.pop("at"), conditions.pop("visit", 0)
        if at != name or any(where.get(key) != value for key, value in conditions.items()):
            continue
        key = json.dumps(failpoint)
        _visits[key] += 1
        if visit in (0, _visits[key]):
            _act(action, name)


def _act(action: str, name: str) -> None:
    kind, _, argument = action.partition(":")
    if kind == "raise":
        raise OSError(f"failpoint {name}")
    if kind == "pause":
        # Opening a FIFO waits until the other side opens it too.
        (Path(argument) / REACHED).write_text(str(os.getpid()))
        (Path(argument) / GO_ON).read_text()
    elif kind == "parent":
        os.kill(os.getppid(), signal.Signals[argument])
    else:
        os.kill(os.getpid(), signal.Signals[kind])
