"""Named places in the code at which a test can cause a fault.

    reach("step.done", worker=1, step=12)      # does nothing unless a test has armed this place

A test arms failpoints in the environment, which all processes of a run inherit:

    PACELINE_FAILPOINTS='[{"at": "step.done", "worker": 1, "step": 12, "do": "SIGKILL"}]'

With `visit` N, only a process's N-th matching call of `reach` causes the fault. All other keys must
equal the arguments of `reach`. `do` is a signal to this process ("SIGKILL"), an OSError ("raise"),
or a pause until the test continues ("pause:FOLDER", see `Pause` in tests/faults.py).
"""

import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

ARMED = "PACELINE_FAILPOINTS"
REACHED, GO_ON = "reached", "go_on"  # named pipes in FOLDER, if `do` is "pause:FOLDER"
_visits: Counter[str] = Counter()


def reach(name: str, **where: Any) -> None:
    """Perform the action that a test has armed for this name and these arguments, if any."""
    armed = os.environ.get(ARMED)
    if not armed:
        return
    for failpoint in json.loads(armed):
        key, action, visit = str(failpoint), failpoint.pop("do"), failpoint.pop("visit", 0)
        if failpoint.pop("at") == name and failpoint.items() <= where.items():
            _visits[key] += 1
            if visit in (0, _visits[key]):
                _act(action, name)


def _act(action: str, name: str) -> None:
    kind, _, folder = action.partition(":")
    if kind == "raise":
        raise OSError(f"failpoint {name}")
    if kind == "pause":
        # Opening a FIFO waits until the test opens the other end.
        (Path(folder) / REACHED).write_text(str(os.getpid()))
        (Path(folder) / GO_ON).read_text()
    else:
        os.kill(os.getpid(), signal.Signals[kind])
