"""Commands in child processes, each with a deadline, and the one JSON object that they print."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

_TERMINATION_S = 5.0  # for the child to end its workers
_PREFIX = "paceline: "


class Crashed(Exception):
    """A child did not do what it was to do; the text says why, in one line."""


def answer(arguments: Sequence[str], deadline_s: float) -> dict[str, Any]:
    """Run `paceline ARGUMENTS --json` and return its JSON object.

    Raises Crashed with the child's own words, or how it was ended. Neither the child nor a worker
    of it is left when this returns or raises, nor when this process is killed.
    """
    command = [sys.executable, "-m", "paceline.scaling.child", str(os.getpid()), *arguments]
    process = subprocess.Popen(  # noqa: S603 - a command of our own
        [*command, "--json"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    try:
        out, err = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        raise Crashed(f"was not done after {deadline_s:g} s, the deadline") from None
    finally:
        _end(process)
    if process.returncode:
        raise Crashed(_reason(process.returncode, err))
    try:
        found = json.loads(out)
    except ValueError:
        raise Crashed("printed no JSON: the model, or what it imports, prints, too") from None
    if not isinstance(found, dict):
        raise Crashed("printed no JSON object")
    return found


def _end(process: "subprocess.Popen[str]") -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_TERMINATION_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()


def _reason(code: int, err: str) -> str:
    """Return why a child ended, in its own words where it had any."""
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    lines = [line.strip() for line in err.splitlines() if line.strip()]
    own = [line.removeprefix(_PREFIX) for line in lines if line.startswith(_PREFIX)]
    if own:
        return own[-1]
    words = f"; its last line: {lines[-1]}" if lines else ""
    return f"ended with exit code {code}{words}"
