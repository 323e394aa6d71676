"""One host of the test bed: namespaces that last as long as one process."""

import shutil
import subprocess
from collections.abc import Sequence

from paceline.core.errors import PacelineError

_TOOLS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "taskset": "util-linux",
    "mount": "util-linux",
    "timeout": "coreutils",
}
_UNSHARE = ("unshare", "--net", "--pid", "--mount-proc", "--fork", "--kill-child")
# Interfaces and shared memory are the host's own. `read` ends at a line, or when nobody holds the
# other end of the input any more.
_FIRST_PROCESS = (
    "mount -t sysfs sysfs /sys && mount -t tmpfs tmpfs /dev/shm && echo ready && read -r line"
)


class NoTestBed(PacelineError):
    """This machine cannot build the hosts."""


def missing() -> str | None:
    """Return what this machine or user lacks for the test bed, in one line; None if nothing."""
    absent = [f"{tool} ({package})" for tool, package in _TOOLS.items() if not shutil.which(tool)]
    if absent:
        return f"the network test bed needs {', '.join(absent)}"
    trial = subprocess.run([*_UNSHARE, "true"], capture_output=True, text=True)
    if trial.returncode:
        return f"the network test bed needs root, to make namespaces: {trial.stderr.strip()}"
    return None


def checked(command: Sequence[str]) -> str:
    """Return what a command printed; raise NoTestBed with its words if it failed."""
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
    if done.returncode:
        raise NoTestBed(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout


class Host:
    """A host: a network, process numbers, /sys and /dev/shm of its own; the files are shared.

    Its first process holds all of it, and waits for a line from the process that made the host.
    However that one ends, the first process then finds the end of its input and ends too, and the
    kernel takes down what is left of the host: processes, interfaces and mounts. Nothing of it has
    a name that could stay behind.
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
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise NoTestBed(f"no host could be made: {self._process.communicate()[1].strip()}")

    @property
    def pid(self) -> int:
        """A process in the host's network, as the owner numbers it."""
        return self._process.pid

    def in_network(self, *command: str) -> list[str]:
        """Return the command that runs this one in the network of the host, but not on it."""
        return ["nsenter", f"--target={self.pid}", "--net", *command]

    def on_host(self, *command: str) -> list[str]:
        """Return the command that runs this one on the host, with process numbers of its own.

        All that it has started ends with it, and it ends with the host.
        """
        inner = f"--pid=/proc/{self.pid}/ns/pid_for_children"
        own = ["unshare", "--pid", "--mount-proc", "--fork", "--kill-child"]
        return self.in_network("--mount", inner, "setpriv", "--pdeathsig", "KILL", *own, *command)

    def close(self) -> None:
        """End all that runs on the host, and wait until it has ended."""
        self._process.communicate("end\n")
