"""Failpoints in commands and processes that a test starts."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from paceline.links.failpoints import ARMED, GO_ON, REACHED


@contextmanager
def failpoints(*armed: dict[str, Any]) -> Iterator[None]:
    """Arm failpoints in all processes that the block starts."""
    os.environ[ARMED] = json.dumps(armed)
    try:
        yield
    finally:
        del os.environ[ARMED]


@contextmanager
def told(path: Path) -> Iterator[TextIO]:
    """Create a FIFO, and open it to read the lines that processes write."""
    os.mkfifo(path)
    with os.fdopen(os.open(path, os.O_RDWR)) as lines:  # writable, too: no end of file
        yield lines


class Pause:
    """A failpoint at which a process waits until the test continues it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        for name in (REACHED, GO_ON):
            os.mkfifo(folder / name)

    def at(self, name: str, **where: Any) -> dict[str, Any]:
        """Return the failpoint for `failpoints`."""
        return {"at": name, "do": f"pause:{self.folder}", **where}

    def reached(self) -> int:
        """Wait until a process reaches the failpoint; return its process id."""
        return int((self.folder / REACHED).read_text())

    def go_on(self) -> None:
        """Continue the process."""
        (self.folder / GO_ON).write_text("")
