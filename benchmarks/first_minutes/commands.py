"""Measure commands that measure nothing, and the time from `pip install` to a first plan."""

import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from figures import spread

_ROOT = Path(__file__).parents[2]
_DEADLINE_S = 900.0
_COMMANDS = {
    "paceline --help": "--help",
    "paceline plan alexnet --machine two-hosts-gigabit": (
        "plan alexnet --machine two-hosts-gigabit"
    ),
    "the same of 16,384 workers": (
        "plan alexnet --machine cluster-16384 --workers 16384 --batch-size 262144"
    ),
}
_REPEATS, _QUICK_REPEATS = 9, 2
_MINE = """
from torch import nn


def net():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
"""


def commands(quick: bool) -> dict[str, Any]:
    """Return the CPU time and the elapsed time of each command."""
    program, found = Path(sys.executable).with_name("paceline"), {}
    for name, words in _COMMANDS.items():
        count = _QUICK_REPEATS if quick else _REPEATS
        taken = [_timed(Path.cwd(), program, *words.split()) for _ in range(count)]
        elapsed, processor = zip(*taken, strict=True)
        found[name] = {"processor_s": spread(processor), "elapsed_s": spread(elapsed)}
    return found


def installed(quick: bool) -> dict[str, Any]:
    """Return the seconds of installing the wheel with dependencies, and of a first plan."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps")
        _timed(folder, *pip, "--wheel-dir", folder, _ROOT)
        (wheel,) = folder.glob("paceline-*.whl")
        return {"runs": [_first_time(wheel, folder / str(i)) for i in range(1 if quick else 2)]}


def _first_time(wheel: Path, folder: Path) -> dict[str, float]:
    folder.mkdir()
    (folder / "mine.py").write_text(_MINE)
    _timed(folder, sys.executable, "-m", "venv", "env")
    programs = folder / "env" / "bin"
    pip = (programs / "python", "-m", "pip", "install", "--quiet")
    installed_s, _ = _timed(folder, *pip, "-c", _ROOT / "constraints.txt", f"{wheel}[data]")
    plan = (programs / "paceline", "plan", "mine:net", "--data", "digits")
    return {"installed_s": installed_s, "planned_s": _timed(folder, *plan)[0]}


def _timed(folder: Path, *command: object) -> tuple[float, float]:
    """Run a command to its end; return its elapsed time and CPU time in seconds."""
    began_s, before = time.monotonic(), os.times()
    words = [str(part) for part in command]
    subprocess.run(words, cwd=folder, stdout=subprocess.DEVNULL, timeout=_DEADLINE_S, check=True)
    after = os.times()
    used_s = after.children_user - before.children_user
    used_s += after.children_system - before.children_system
    return time.monotonic() - began_s, used_s
