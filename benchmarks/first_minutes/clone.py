"""Measure the time from `git clone` to the demo's report, and the demos' prediction errors."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from paceline.records.result import RunResult

ROOT = Path(__file__).parents[2]
_DEADLINE_S = 900.0
_TAKES_A_CORE = "while True: pass"


def clone(quick: bool) -> dict[str, Any]:
    """Return the seconds of cloning, of a demo with installation, and of a second demo."""
    runs = []
    for _ in range(1 if quick else 2):
        with _cloned() as (folder, cloned_s):
            first_s, again_s = _demo(folder), _demo(folder)
        runs.append({"cloned_s": cloned_s, "first_demo_s": first_s, "second_demo_s": again_s})
    return {"runs": runs}


def demos(quick: bool) -> dict[str, Any]:
    """Return each demo's predicted step, predicted range and measured step.

    Half of the demos run next to a program that keeps a core busy.
    """
    count = 1 if quick else 10
    with _cloned() as (folder, _):
        _demo(folder)  # installs
        quiet = [_told(folder) for _ in range(count)]
        beside = [_told_beside_work(folder) for _ in range(count)]
    return {"quiet": quiet, "beside a program that takes a core": beside}


def _told_beside_work(folder: Path) -> dict[str, float]:
    with subprocess.Popen([sys.executable, "-c", _TAKES_A_CORE]) as work:
        try:
            return _told(folder)
        finally:
            work.kill()


def _told(folder: Path) -> dict[str, float]:
    _demo(folder)
    newest = max(folder.glob("runs/*/result.json"), key=lambda path: path.stat().st_mtime)
    result = RunResult.model_validate_json(newest.read_text())
    predicted, span = result.predicted_step_s, result.predicted_range_s
    if predicted is None or span is None or result.step_s is None:
        sys.exit(f"{newest}: has no prediction beside a measured step")
    return {
        "predicted_s": predicted,
        "least_s": span[0],
        "most_s": span[1],
        "measured_s": result.step_s,
    }


@contextmanager
def _cloned() -> Iterator[tuple[Path, float]]:
    """Clone the last commit; yield the folder and the seconds of cloning."""
    with TemporaryDirectory() as name:
        folder = Path(name) / "paceline"
        began_s = time.monotonic()
        subprocess.run(
            [_program("git"), "clone", "--quiet", str(ROOT), str(folder)],
            timeout=_DEADLINE_S,
            check=True,
        )
        yield folder, time.monotonic() - began_s


def _demo(folder: Path) -> float:
    """Run `make demo`; return its seconds, or exit if it writes no report."""
    before = set(folder.glob("runs/*/report.html"))
    began_s = time.monotonic()
    command = [_program("make"), "demo", f"PYTHON={sys.executable}"]
    subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL, timeout=_DEADLINE_S, check=True)
    took_s = time.monotonic() - began_s
    if len(set(folder.glob("runs/*/report.html")) - before) != 1:
        sys.exit(f"{folder}: `make demo` has left no report")
    print(json.dumps({"demo_s": round(took_s, 1)}), file=sys.stderr, flush=True)
    return took_s


def _program(name: str) -> str:
    """Return the path of a program; exit if it is not installed."""
    return shutil.which(name) or sys.exit(f"{name} is needed, and there is none")
