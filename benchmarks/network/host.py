"""Create one host of the test bed: Linux namespaces that end with one process."""

import shutil
import subprocess
from collections.abc import Sequence

from paceline.core.errors import PacelineError

_TOOLS = ("ip", "tc", "unshare", "nsenter", "setpriv", "taskset", "mount", "timeout")
_UNSHARE = ("unshare", "--net", "--pid", "--mount-proc", "--fork", "--kill-child")
# The mounts show the host's interfaces, and give it separate shared memory. `read` returns at a
# line, or at the end of input when the owner ends.
_FIRST_PROCESS = (
    "mount -t sysfs sysfs /sys && mount -t tmpfs tmpfs /dev/shm && echo ready && read -r line"
)


class NoTestBed(PacelineError):
    """Raised if this machine or user cannot build the hosts."""


def missing() -> str | None:
    """Describe in one line why this machine or user cannot build hosts; None if it can."""
    if absent := [tool for tool in _TOOLS if not shutil.which(tool)]:
        return f"the network test bed needs {', '.join(absent)} (iproute2, util-linux, coreutils)"
    trial = subprocess.run([*_UNSHARE, "true"], capture_output=True, text=True)
    if trial.returncode:
        return f"the network test bed needs root, to make namespaces: {trial.stderr.strip()}"
    return None


def checked(command: Sequence[str]) -> str:
    """Run a command and return its stdout; raise NoTestBed with its stderr if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
    if done.returncode:
        raise NoTestBed(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout


class Host:
    """A host with a separate network, process numbers, /sys and /dev/shm, but the machine's files.

    The host's first process keeps the namespaces alive, and waits for a line from the owner, which
    is the process that created this object. However the owner ends, the first process then reads
    the end of its input and ends, too. The kernel then removes the host's processes, interfaces and
    mounts. The namespaces have no names, so nothing stays behind.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [*_UNSHARE, "sh", "-c", _FIRST_PROCESS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C reaches the owner only
        )
        if self._process.stdout.readline() != "ready\n":
            raise NoTestBed(f"cannot create a host: {self._process.communicate()[1].strip()}")

    @property
    def pid(self) -> int:
        """The pid, in the owner's numbering, of a process in the host's network."""
        return self._process.pid

    def in_network(self, *command: str) -> list[str]:
        """Wrap a command to run in the host's network, but outside its other namespaces."""
        return ["nsenter", f"--target={self.pid}", "--net", *command]

    def on_host(self, *command: str) -> list[str]:
        """Wrap a command to run on the host in a new PID namespace.

        All processes that the command starts end with it, and the command ends with the host.
        """
        inner = f"--pid=/proc/{self.pid}/ns/pid_for_children"
        own = ["unshare", "--pid", "--mount-proc", "--fork", "--kill-child"]
        return self.in_network("--mount", inner, "setpriv", "--pdeathsig", "KILL", *own, *command)

    def close(self) -> None:
        """End all processes of the host, and wait for their end."""
        self._process.communicate("end\n")
