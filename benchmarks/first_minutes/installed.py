"""Measure the time from `pip install` of a wheel to a first plan."""

import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parents[2]
_DEADLINE_S = 900.0
_MINE = """
from torch import nn


def net():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
"""


def installed(quick: bool) -> dict[str, Any]:
    """Return the seconds of installing the wheel with dependencies, and of a first plan."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps")
        _timed(folder, *pip, "--wheel-dir", folder, ROOT)
        (wheel,) = folder.glob("paceline-*.whl")
        return {"runs": [_first_time(wheel, folder / str(i)) for i in range(1 if quick else 2)]}


def _first_time(wheel: Path, folder: Path) -> dict[str, float]:
    folder.mkdir()
    (folder / "mine.py").write_text(_MINE)
    _timed(folder, sys.executable, "-m", "venv", "env")
    programs = folder / "env" / "bin"
    pip = (programs / "python", "-m", "pip", "install", "--quiet")
    constraints = ("-c", ROOT / "constraints.txt")
    installed_s = _timed(folder, *pip, *constraints, f"{wheel}[data]")
    plan = (programs / "paceline", "plan", "mine:net", "--data", "digits")
    return {"installed_s": installed_s, "planned_s": _timed(folder, *plan)}


def _timed(folder: Path, *command: object) -> float:
    """Run a command to its end; return the seconds."""
    began_s = time.monotonic()
    words = [str(part) for part in command]
    subprocess.run(words, cwd=folder, stdout=subprocess.DEVNULL, timeout=_DEADLINE_S, check=True)
    return time.monotonic() - began_s
