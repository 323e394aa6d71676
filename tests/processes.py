"""Commands in process groups of their own, with a deadline, of which nothing may be left."""

import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

DEADLINE_S = 90.0


def is_running(pid: int) -> bool:
    """Whether the process runs; one that has ended but was not yet waited for does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def members_of(group: int) -> dict[int, str]:
    """The processes of a process group that still run, with their command lines."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            command = (stat.parent / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] not in "ZX":
            found[int(stat.parent.name)] = command
    return found


@dataclass
class Finished:
    code: int
    out: str
    err: str
    seconds: float


class Started:
    """A command in a process group of its own, of which nothing may be left in the end."""

    def __init__(self, command: list[str], cwd: Path, on_gpu: bool = False) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(cwd)}
        if not on_gpu:  # more workers than this machine may have GPUs
            environment["CUDA_VISIBLE_DEVICES"] = ""
        self._started = time.monotonic()
        self.process = subprocess.Popen(
            command,
            cwd=cwd,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def finish(self, deadline_s: float = DEADLINE_S) -> Finished:
        out, err = self.process.communicate(timeout=deadline_s)
        seconds = time.monotonic() - self._started
        return Finished(self.process.returncode, out, err, seconds)

    def members(self) -> dict[int, str]:
        """The processes of the group that still run, with their command lines."""
        return members_of(self.process.pid)

    def workers(self) -> list[int]:
        """The process numbers of the ranks, in the order in which they were started."""
        return sorted(
            pid for pid, command in self.members().items() if "paceline.worker" in command
        )

    def kill(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
