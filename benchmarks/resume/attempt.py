"""One start of the command line: its processes, its end by itself or by SIGKILL, what it leaves."""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
_DEADLINE_S = 300.0  # for a run of seconds on a machine that is busy
_POLL_S = 0.002
_GONE_S = 20.0  # for processes to end after the launcher has
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - is looked at, not written to
_ROLES = {  # of processes that the launcher has started, by a word of their command lines
    "paceline.links.forkserver": "fork server",
    "paceline.runs.launching": "rank",
    "paceline.strategies.hogbatch.worker": "worker",
    "paceline.strategies.wheel.worker": "body",
}
_OTHER = "other"
_CACHE = "torchinductor_"  # torch keeps it from one process to the next


class Ended(NamedTuple):
    """How an attempt has ended: its exit code, what it said, in which time after a kill.

    `left` are processes and files in shared memory or among temporary files that stayed behind it.
    """

    code: int
    said: str
    ended_s: float
    left: list[str]

    @property
    def complaint(self) -> str:
        """The last line that begins as an error of the command line does."""
        lines = [one for one in self.said.splitlines() if one.startswith("paceline: ")]
        return lines[-1] if lines else ""


@dataclass
class Attempt:
    """A command in a session of its own, by which all its processes are known.

    `lead` is what the process that was asked is called: launcher, hub, coordinator.
    """

    arguments: Sequence[str]
    folder: Path
    lead: str

    def __post_init__(self) -> None:
        self._shared = set(_SHARED_MEMORY.iterdir())
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - `end` closes it
        self._temporary = tempfile.TemporaryDirectory()
        self._ended: Ended | None = None
        self._began_s, self._began_ns = time.monotonic(), time.time_ns()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "paceline", *self.arguments],
            cwd=self.folder,
            env=os.environ | {"PYTHONPATH": str(HERE), "TMPDIR": self._temporary.name},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._said,
            start_new_session=True,
        )

    @property
    def is_running(self) -> bool:
        """Whether the process that was asked runs."""
        return self.process.poll() is None

    def has_written(self, path: Path) -> bool:
        """Whether a file or a folder is this attempt's, and not that of an earlier one."""
        with suppress(OSError):
            return path.stat().st_mtime_ns >= self._began_ns
        return False

    def processes(self) -> dict[int, str]:
        """Return the processes of the session that run, with their roles."""
        return {pid: self._role(pid) for pid in _of_session(self.process.pid)}

    def wait_until(self, is_so: Callable[[], bool]) -> bool:
        """Wait until something is so; False if the attempt has ended before."""
        while not is_so():
            if not self.is_running:
                return False
            _check(self._began_s)
            time.sleep(_POLL_S)
        return True

    def kill_one(self, choice: random.Random) -> str | None:
        """Kill one process of a role drawn at random; return the role, None if none runs."""
        found = self.processes()
        if not found:
            return None
        role = choice.choice(sorted(set(found.values())))
        pid = choice.choice(sorted(pid for pid, own in found.items() if own == role))
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return role

    def end(self) -> Ended:
        """Wait until the attempt has ended, and all its processes; end those that stay."""
        if self._ended is None:
            self._ended = self._end()
        return self._ended

    def _end(self) -> Ended:
        now_s = time.monotonic()
        self.process.wait(_DEADLINE_S)
        until_s = time.monotonic() + _GONE_S
        while (left := self.processes()) and time.monotonic() < until_s:
            time.sleep(_POLL_S)
        ended_s = time.monotonic() - now_s
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._said.seek(0)
        said = self._said.read()
        self._said.close()
        files = set(_SHARED_MEMORY.iterdir()) - self._shared
        temporary = Path(self._temporary.name)
        files |= {one for one in temporary.iterdir() if not one.name.startswith(_CACHE)}
        self._temporary.cleanup()
        named = [f"{role} {pid}" for pid, role in left.items()]
        return Ended(self.process.returncode, said, ended_s, [*named, *sorted(map(str, files))])

    def _role(self, pid: int) -> str:
        if pid == self.process.pid:
            return self.lead
        with suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_text()
            return next((role for word, role in _ROLES.items() if word in command), _OTHER)
        return _OTHER


def _of_session(session: int) -> list[int]:
    """Return the processes of a session that run; none that has ended and is not waited for."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] not in "ZX":
                found.append(int(stat.parent.name))
    return found


def _check(began_s: float) -> None:
    if time.monotonic() - began_s > _DEADLINE_S:
        sys.exit(f"a run was not where it was waited for after {_DEADLINE_S:g} s")
