"""Faults at failpoints of the code, for commands and processes that a test starts."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from paceline.links.failpoints import ARMED, GO_ON, REACHED


@contextmanager
def failpoints(*armed: dict[str, Any]) -> Iterator[None]:
    """Arm failpoints for all processes that are started within."""
    os.environ[ARMED] = json.dumps(armed)
    try:
        yield
    finally:
        del os.environ[ARMED]


@contextmanager
def told(path: Path) -> Iterator[TextIO]:
    """Make a FIFO, and give the lines that processes write to it."""
    os.mkfifo(path)
    with os.fdopen(os.open(path, os.O_RDWR)) as lines:  # never at its end
        yield lines


class Pause:
    """A process that waits at a failpoint until the test lets it go on."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        for name in (REACHED, GO_ON):
            os.mkfifo(folder / name)

    def at(self, name: str, **where: Any) -> dict[str, Any]:
        """Return the failpoint to arm."""
        return {"at": name, "do": f"pause:{self.folder}", **where}

    def reached(self) -> int:
        """Wait until a process has come to the failpoint; return its number."""
        return int((self.folder / REACHED).read_text())

    def go_on(self) -> None:
        """Let the process go on."""
        (self.folder / GO_ON).write_text("")
