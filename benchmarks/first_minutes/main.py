"""Measure a new user's waiting times: clone and demo, a first plan, short commands.

Clones of the last commit and virtual environments are created in a temporary folder. The times
include pip's downloads of torch and other dependencies from its configured index.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from figures import Part, shown, spread, table

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
_MINE = """
from torch import nn


def net():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
"""


def clone(quick: bool) -> dict[str, Any]:
    """Return the seconds of cloning, of a demo with installation, and of a second demo."""
    runs = []
    for _ in range(1 if quick else 2):
        with _cloned() as (folder, cloned_s):
            first_s, again_s = _demo(folder), _demo(folder)
        runs.append({"cloned_s": cloned_s, "first_demo_s": first_s, "second_demo_s": again_s})
    return {"runs": runs}


@contextmanager
def _cloned() -> Iterator[tuple[Path, float]]:
    """Clone the last commit; yield the folder and the seconds of cloning."""
    with TemporaryDirectory() as name:
        folder = Path(name) / "paceline"
        yield folder, _timed(Path(name), _program("git"), "clone", "--quiet", _ROOT, folder)[0]


def _demo(folder: Path) -> float:
    """Run `make demo`; return its seconds, or exit if it writes no report."""
    before = set(folder.glob("runs/*/report.html"))
    took_s, _ = _timed(folder, _program("make"), "demo", f"PYTHON={sys.executable}")
    if len(set(folder.glob("runs/*/report.html")) - before) != 1:
        sys.exit(f"{folder}: `make demo` has left no report")
    print(json.dumps({"demo_s": round(took_s, 1)}), file=sys.stderr, flush=True)
    return took_s


def _program(name: str) -> str:
    """Return the path of a program; exit if it is not installed."""
    return shutil.which(name) or sys.exit(f"{name} is needed, and there is none")


def commands(quick: bool) -> dict[str, Any]:
    """Return the CPU time and the elapsed time of each command."""
    program, found = Path(sys.executable).with_name("paceline"), {}
    for name, words in _COMMANDS.items():
        taken = [_timed(Path.cwd(), program, *words.split()) for _ in range(2 if quick else 9)]
        elapsed, processor = zip(*taken, strict=True)
        found[name] = {"processor_s": spread(processor), "elapsed_s": spread(elapsed)}
    return found


def installed(quick: bool) -> dict[str, Any]:
    """Return the seconds of installing the wheel with dependencies, and of a first plan."""
    runs = []
    for _ in range(1 if quick else 2):
        with TemporaryDirectory() as name:
            folder, programs = Path(name), Path(name) / "env" / "bin"
            (folder / "mine.py").write_text(_MINE)
            build = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps")
            _timed(folder, *build, "--wheel-dir", folder, _ROOT)
            (wheel,) = folder.glob("paceline-*.whl")
            _timed(folder, sys.executable, "-m", "venv", "env")
            pip = (programs / "python", "-m", "pip", "install", "--quiet")
            installed_s, _ = _timed(folder, *pip, "-c", _ROOT / "constraints.txt", f"{wheel}[data]")
            plan = (programs / "paceline", "plan", "mine:net", "--data", "digits")
            runs.append({"installed_s": installed_s, "planned_s": _timed(folder, *plan)[0]})
    return {"runs": runs}


def _timed(folder: Path, *command: object) -> tuple[float, float]:
    """Run a command to its end; return its elapsed time and CPU time in seconds."""
    began_s, before = time.monotonic(), os.times()
    words = [str(part) for part in command]
    subprocess.run(words, cwd=folder, stdout=subprocess.DEVNULL, timeout=_DEADLINE_S, check=True)
    after = os.times()
    used_s = sum(after[2:4]) - sum(before[2:4])  # of children, in user and system mode
    return time.monotonic() - began_s, used_s


def _runs(title: str, columns: Mapping[str, str], runs: Sequence[Mapping[str, float]]) -> str:
    """Return a table with each run's seconds by part, their sum, and the median sum."""
    sums = [sum(run[name] for name in columns) for run in runs]
    lines = [
        (str(number), *(f"{run[name]:.1f}" for name in columns), f"{whole:.1f}")
        for number, (run, whole) in enumerate(zip(runs, sums, strict=True), 1)
    ]
    lines.append(("median", *("" for _ in columns), f"{median(sums):.1f}"))
    return table(title, ("run", *columns.values(), "together"), lines)


def _clone(figures: dict[str, Any]) -> str:
    columns = {"cloned_s": "git clone", "first_demo_s": "make demo, which installs"}
    runs = figures["runs"]
    again = ", ".join(f"{run['second_demo_s']:.1f}" for run in runs)
    title = "Seconds from `git clone` to the demo's report"
    return f"{_runs(title, columns, runs)}\n\nA second demo takes {again} s."


def _installed(figures: dict[str, Any]) -> str:
    columns = {"installed_s": "pip install", "planned_s": "paceline plan mine:net --data digits"}
    title = "Seconds from `pip install` of the wheel to a plan of one's own module"
    return _runs(title, columns, figures["runs"])


def _commands(figures: dict[str, Any]) -> str:
    columns = ("processor_s", "elapsed_s")
    lines = [(name, *(shown(row[one]) for one in columns)) for name, row in figures.items()]
    return table("Commands that measure nothing, s", ("", "of processors", "elapsed"), lines)


PARTS = {
    "clone": Part(clone, _clone, "The demo of a clone"),
    "installed": Part(installed, _installed, "A first plan"),
    "commands": Part(commands, _commands, "Commands"),
}
