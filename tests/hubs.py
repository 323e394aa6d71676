"""Hubs and workers as commands: their addresses, output and results."""

import json
import re
from typing import Any

from processes import Started


def result_of(run: Started) -> dict[str, Any]:
    done = run.finish()
    assert done.code == 0, done.err
    assert "Traceback" not in done.err
    result: dict[str, Any] = json.loads(done.out)
    return result


def until(run: Started, what: str) -> str:
    """Return the first line of standard error that contains `what`."""
    seen = []
    for line in iter(run.process.stderr.readline, ""):
        seen.append(line)
        if what in line:
            return line
    raise AssertionError("".join(seen))


def address_of(hub: Started) -> str:
    return re.search(r"tcp://[^ ;]+", until(hub, "listening on"))[0]
