"""Fuzz the parsers of files and frames within limits of memory and time.

`measure` counts each parser's inputs: accepted, refused with one clear line, unclear (an error of
several lines, or no result), crashed, hung, and killed (SIGKILL). `peak_nbytes` is the largest
growth of peak memory in a process that ran the parser.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
_MODULES = [str(HERE), str(HERE.parent), str(HERE.parents[1] / "tests")]
sys.path[:0] = _MODULES

from fuzzing.parser import FRAMES, NAMES, parser_of  # noqa: E402

_AT_ONCE = 10_000  # inputs per process: Hypothesis uses memory for each input
_ENDS = {-signal.SIGPROF: "hung", -signal.SIGALRM: "hung", -signal.SIGKILL: "killed"}
_KINDS = ("accepted", "refused", "unclear", "crashed", "hung", "killed")


def measure(count: int, seed: int, *, is_frame: bool) -> list[dict[str, Any]]:
    """Fuzz the parsers with `count` inputs in all; print and return each parser's counts."""
    parsers = [parser_of(name) for name in NAMES if (name in FRAMES) == is_frame]
    whole = sum(one.weight for one in parsers)
    rows = []
    for parser in parsers:
        rows.append(fuzzed(parser.name, seed, round(parser.weight / whole * count)))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def fuzzed(name: str, seed: int, count: int) -> dict[str, Any]:
    """Fuzz one parser with `count` inputs; return its counts and faults."""
    row: dict[str, Any] = {"parser": name, **dict.fromkeys(_KINDS, 0), "faults": []}
    row |= {"peak_nbytes": 0, "longest_s": 0.0}
    for first in range(0, count, _AT_ONCE):
        found = _run(name, seed + first, min(_AT_ONCE, count - first))
        if (fault := found.pop("fault")) is not None:
            row["faults"].append(fault)
        for key in ("peak_nbytes", "longest_s"):
            row[key] = max(row[key], found.pop(key, 0))
        for key, number in found.items():
            row[key] += number
    return row | {"tried": sum(row[kind] for kind in _KINDS)}


def _run(name: str, seed: int, count: int) -> dict[str, Any]:
    environment = dict(os.environ) | {
        "PYTHONPATH": os.pathsep.join(_MODULES),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    with tempfile.TemporaryDirectory() as scratch:
        at_work = Path(scratch) / "at-work"
        done = subprocess.run(
            [sys.executable, "-m", "fuzzing.child", name, str(seed), str(count), str(at_work)],
            env=environment | {"TMPDIR": scratch},
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode == 0:
            found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
            return found
        if not at_work.exists():
            raise SystemExit(f"{name}: the process ended before the first input: {done.stderr}")
        shown = at_work.read_bytes()[:1000]
        fault = f"exit {done.returncode}, {shown!r}: {done.stderr[-500:]}"
        return {_ENDS.get(done.returncode, "crashed"): 1, "fault": fault}
