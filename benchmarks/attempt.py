"""Run a command, kill its processes, and report its exit code and leftovers."""

import os
import random
import re
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

import psutil

_DEADLINE_S = 300.0  # a run needs seconds, but the machine may be busy
_POLL_S = 0.002
_KILLING_S = 10.0  # killed processes may still wait for a driver
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - only listed, never written
_ROLES = {  # role of a process that the launcher started, by a word in its command line
    "paceline.links.forkserver": "fork server",
    "paceline.runs.launching": "rank",
    "paceline.strategies.hogbatch.worker": "worker",
    "paceline.strategies.wheel.worker": "body",
    "own_loop.py": "rank",
}
_LISTENS = re.compile(r"listening on tcp://127.0.0.1:(\d+)")
_OTHER = "other"
# Torch caches compiled code in the first; torchrun never deletes the second.
_OF_TORCH = ("torchinductor_", "torchelastic_")


class Ended(NamedTuple):
    """How an attempt ended: exit code, stderr, and seconds that `end` waited for its processes.

    `left`: processes, and files in shared memory or in the temporary folder, that remained.
    """

    code: int
    said: str
    ended_s: float
    left: list[str]


@dataclass
class Attempt:
    """A running command, whose processes are identified by its temporary folder.

    `arguments`: arguments of Python. `lead`: role of the first process: launcher, hub, coordinator.
    `modules`: PYTHONPATH. `gone_s`: how long the other processes may outlive the first process.
    """

    arguments: Sequence[str]
    folder: Path
    lead: str
    modules: Path
    gone_s: float = 20.0

    def __post_init__(self) -> None:
        self._shared = set(_SHARED_MEMORY.iterdir())
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - `end` closes it
        self._temporary = tempfile.TemporaryDirectory()
        self._ended: Ended | None = None
        self._began_s, self._began_ns = time.monotonic(), time.time_ns()
        self.process = subprocess.Popen(
            [sys.executable, *self.arguments],
            cwd=self.folder,
            env=os.environ | {"PYTHONPATH": str(self.modules), "TMPDIR": self._temporary.name},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._said,
            start_new_session=True,
        )

    @property
    def is_running(self) -> bool:
        """Whether the first process is running."""
        return self.process.poll() is None

    def has_written(self, path: Path) -> bool:
        """Whether a file or folder was modified since this attempt began."""
        with suppress(OSError):
            return path.stat().st_mtime_ns >= self._began_ns
        return False

    def processes(self) -> dict[int, str]:
        """Return the role of each running process, by process id."""
        return {pid: self._role(pid) for pid in processes_of(self._temporary.name)}

    def wait_until(self, is_so: Callable[[], bool]) -> bool:
        """Wait until `is_so()` is true; return False if the command ends first."""
        while not is_so():
            if not self.is_running:
                return False
            if time.monotonic() - self._began_s > _DEADLINE_S:
                sys.exit(f"a run was not where it was waited for after {_DEADLINE_S:g} s")
            time.sleep(_POLL_S)
        return True

    def sleep(self, seconds: float) -> bool:
        """Wait for some seconds; return False if the command ends first."""
        until_s = time.monotonic() + seconds
        return self.wait_until(lambda: time.monotonic() >= until_s)

    def draw(self, choice: random.Random) -> tuple[int, str] | None:
        """Draw a random role and process: (process id, role), or None if none runs."""
        found = self.processes()
        if not found:
            return None
        role = choice.choice(sorted(set(found.values())))
        return choice.choice(sorted(pid for pid, own in found.items() if own == role)), role

    def port(self, within_s: float = 120.0) -> int | None:
        """Wait until a hub listens; return its port, None on end or timeout."""
        until_s = time.monotonic() + within_s
        while self.is_running and time.monotonic() < until_s:
            said = os.pread(self._said.fileno(), 1 << 20, 0).decode(errors="replace")
            if found := _LISTENS.search(said):
                return int(found[1])
            time.sleep(0.05)
        return None

    def kill(self) -> None:
        """Kill the first process, then end all others."""
        if self._ended is None:
            self.process.kill()
            self.end()

    def end(self) -> Ended:
        """Wait until all processes have ended; kill the remaining ones after `gone_s`."""
        if self._ended is None:
            self._ended = self._end()
        return self._ended

    def _end(self) -> Ended:
        now_s = time.monotonic()
        self.process.wait(_DEADLINE_S)
        until_s = time.monotonic() + self.gone_s
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
        files |= {one for one in temporary.iterdir() if not one.name.startswith(_OF_TORCH)}
        self._temporary.cleanup()
        named = [f"{role} {pid}" for pid, role in left.items()]
        return Ended(self.process.returncode, said, ended_s, [*named, *sorted(map(str, files))])

    def _role(self, pid: int) -> str:
        if pid == self.process.pid:
            return self.lead
        with suppress(psutil.Error):
            command = " ".join(psutil.Process(pid).cmdline())
            return next((role for word, role in _ROLES.items() if word in command), _OTHER)
        return _OTHER


def peak_nbytes(pid: int) -> int:
    """Return a process's peak resident bytes; getrusage's peak would include its parent's."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    return 0


def processes_of(temporary: str) -> list[int]:
    """Return the running processes, but no zombies, whose TMPDIR is this folder."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("TMPDIR") == temporary and process.is_running():
                found.append(process.pid)
    return found


def end_all(temporary: str) -> None:
    """Kill all processes of this temporary folder; RuntimeError if some still run after 10 s."""
    until_s = time.monotonic() + _KILLING_S
    while left := processes_of(temporary):
        if time.monotonic() > until_s:
            raise RuntimeError(f"processes {left} still run after SIGKILL")
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
