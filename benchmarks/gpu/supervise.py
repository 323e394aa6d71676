"""Run parts in processes of their own, each with a deadline, so that one that fails leaves others.

A part that is not done at its deadline is ended with all processes that it started, those in other
sessions too: tests of GPUs start whole commands, which would go on keeping the GPU busy.
"""

import json
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from part import write

from paceline.links.processes import TERMINATION_S, Process, reason, start

_CHILD = Path(__file__).with_name("child.py")
_MARK = "PACELINE_EVIDENCE_PART"
_MOST_SAID = 10_000  # characters
_KILLING_S = 10.0  # for the kernel to end processes, which may wait for a driver


@dataclass(frozen=True)
class Planned:
    """A part to be run: the module that measures it, and how long it may take."""

    name: str
    module: str
    deadline_s: float


def run_all(parts: Iterable[Planned], folder: Path, options: Sequence[str]) -> bool:
    """Run parts one after another; return True if all were done. Each leaves NAME.json."""
    outcomes = [_run(part, folder, options) for part in parts]
    return all(outcomes)


def _run(part: Planned, folder: Path, options: Sequence[str]) -> bool:
    path = folder / f"{part.name}.json"
    path.unlink(missing_ok=True)  # what an earlier run has left is not this one's
    print(f"\n== {part.name}: at most {part.deadline_s:g} s", flush=True)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        ended = _ended([part.module, str(path), place, *options], part)
    content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    content |= {
        "part": part.name,
        "command": shlex.join(sys.argv),
        "seconds": time.monotonic() - begun,
        "deadline_s": part.deadline_s,
        **_outcome(ended, content.get("why")),
    }
    write(path, content)
    print(f"== {part.name}: {content['outcome']}, {content['seconds']:.0f} s", flush=True)
    return ended.code == 0


class _Ended(NamedTuple):
    """A part's process: its exit code, None at the deadline; what it said; what still runs."""

    code: int | None
    said: str
    left: list[int]


def _ended(arguments: Sequence[str], part: Planned) -> _Ended:
    """Start a part's process and wait for its end, or end it at its deadline."""
    mark = f"{os.getpid()}-{part.name}"
    with tempfile.TemporaryFile() as stderr:
        command = [sys.executable, str(_CHILD), *arguments]
        process = None  # also if a signal comes when it is started, but not yet known here
        try:
            process = start(command, environment={_MARK: mark}, stderr=stderr)
            process.wait(part.deadline_s)
            code = process.poll()
        finally:
            left = _end(process, f"{_MARK}={mark}".encode())
            stderr.seek(0)
            said = stderr.read().decode(errors="replace")
            sys.stderr.write(said)
    return _Ended(code, said, left)


def _outcome(ended: _Ended, why: str | None) -> dict[str, Any]:
    code = ended.code
    outcomes = {None: "ended at its deadline", 0: "done"}
    whys = [why or f"its process {reason(code)}"] if code else []
    whys += [f"process {pid} cannot be ended" for pid in ended.left]
    return {
        "outcome": outcomes.get(code, "failed"),
        "why": "; ".join(whys) or None,
        "stderr": None if code == 0 else ended.said[-_MOST_SAID:],
    }


def _end(process: Process | None, mark: bytes) -> list[int]:
    """End a part's process group, and what else it has started; return what cannot be ended."""
    if process is not None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(TERMINATION_S)
            os.killpg(process.pid, signal.SIGKILL)
        process.close()
    until = time.monotonic() + _KILLING_S
    while (left := _marked(mark)) and time.monotonic() < until:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return left


def _marked(mark: bytes) -> list[int]:
    """Return the processes that were started with this variable in their environment."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended, or is somebody else's
            if mark in environment.read_bytes().split(b"\0"):
                found.append(int(environment.parent.name))
    return found
