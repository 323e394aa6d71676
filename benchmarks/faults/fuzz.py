"""Fuzz every parser, of files and of frames, in limits of memory and time.

`python fuzz.py` changes 10,000 files and 100,000 frames; main.py 100,000 and 1,000,000. An input is
given by its parser, the seed and its number, so that `--parsers NAME --seed SEED --only NUMBER` is
the same input again. For each parser: inputs tried, refused with one clear line, accepted, unclear
(an error of several lines, or none), crashed, hung, out of memory, and the most memory that its
process has taken above what it had. Exit code 1 if a parser has failed on any input.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
_MODULES = [str(HERE), str(HERE.parents[1] / "tests")]
sys.path[:0] = _MODULES

from fuzzing.all_parsers import NAMES, parser_of  # noqa: E402
from fuzzing.child import CPU_S, MEMORY_NBYTES, Progress  # noqa: E402
from fuzzing.parser import Parser  # noqa: E402

_MOST_SHOWN = 20  # faults of a parser
_ENDS = {-signal.SIGPROF: "hung", -signal.SIGALRM: "hung", -signal.SIGKILL: "killed"}


def fuzzed(name: str, seed: int, first: int, last: int) -> dict[str, Any]:
    """Parse the inputs of these numbers; return the counts, and the first faults."""
    keys = ("accepted", "refused", "unclear", "crashed", "hung", "killed", "nbytes")
    counts: dict[str, Any] = dict.fromkeys(keys, 0)
    faults: list[dict[str, Any]] = []
    peak_nbytes, longest_s, began_s = 0, 0.0, time.monotonic()
    while first < last:
        done, number, code, errors = _run(name, seed, first, last)
        for row in done:
            if "fault" in row:
                faults.append(row)
                continue
            peak_nbytes = max(peak_nbytes, row.pop("peak_nbytes"))
            longest_s = max(longest_s, row.pop("longest_s"))
            for key, count in row.items():
                counts[key] += count
        if code == 0:
            break
        if number < first:
            raise SystemExit(f"{name}: the process ended before its first input: {errors}")
        end = _ENDS.get(code, "crashed")
        counts[end] += 1
        faults.append({"fault": end, "number": number, "text": f"exit {code}: {errors[-500:]}"})
        first = number + 1
    counts["tried"] = sum(counts[key] for key in keys if key != "nbytes")
    return {
        "parser": name,
        **counts,
        "peak_nbytes": peak_nbytes,
        "longest_s": round(longest_s, 3),
        "seconds": round(time.monotonic() - began_s, 1),
        "faults": faults[:_MOST_SHOWN],
    }


def _run(name: str, seed: int, first: int, last: int) -> tuple[list[dict[str, Any]], int, int, str]:
    """Run a child; return what it has told, the number it was at, its exit code and its errors."""
    environment = dict(os.environ) | {
        "PYTHONPATH": os.pathsep.join(_MODULES),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    with tempfile.TemporaryFile() as file, tempfile.TemporaryDirectory() as scratch:
        file.truncate(8)  # of the number
        progress = Progress(file.fileno())
        progress.set(-1)
        numbers = map(str, (seed, first, last, file.fileno()))
        done = subprocess.run(
            [sys.executable, "-m", "fuzzing.child", name, *numbers],
            env=environment | {"TMPDIR": scratch},
            pass_fds=(file.fileno(),),
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        return told, progress.number, done.returncode, done.stderr


def shares(parsers: Sequence[Parser], count: int) -> dict[str, tuple[int, int]]:
    """Return the numbers of the inputs of each parser, `count` in all."""
    whole = sum(one.weight for one in parsers)
    return {one.name: (0, round(one.weight / whole * count)) for one in parsers}


def measure(ranges: Mapping[str, tuple[int, int]], seed: int) -> list[dict[str, Any]]:
    """Fuzz the parsers with inputs of these numbers; print and return the counts of each."""
    rows = []
    for name, (first, last) in ranges.items():
        rows.append(fuzzed(name, seed, first, last))
        print(line(rows[-1]), flush=True)
        for fault in rows[-1]["faults"]:
            print(f"  {fault['fault']} by input {fault['number']}: {fault['text']}", flush=True)
    return rows


def main() -> None:
    """Fuzz the parsers, print a line for each, and write the counts as JSON."""
    command = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    command.add_argument("--files", type=int, default=10_000, help="changed files in all")
    command.add_argument("--frames", type=int, default=100_000, help="changed frames in all")
    command.add_argument("--parsers", default=",".join(NAMES), help="only these, as a,b")
    command.add_argument("--seed", type=int, default=int(time.time()))
    command.add_argument("--only", type=int, help="only the input of this number")
    command.add_argument("--output", type=Path, help="a file for the counts as JSON")
    asked = command.parse_args()
    names = [name.strip() for name in asked.parsers.split(",")]
    if unknown := [name for name in names if name not in NAMES]:
        command.error(f"no parser {unknown[0]!r}; known are {', '.join(NAMES)}")
    limits = {"seconds": CPU_S, "memory_nbytes": MEMORY_NBYTES}
    print(f"seed {asked.seed}; of an input at most {limits}", flush=True)
    parsers = [parser_of(name) for name in names]
    if asked.only is not None:
        ranges = {parser.name: (asked.only, asked.only + 1) for parser in parsers}
    else:
        ranges = shares([one for one in parsers if not one.is_frame], asked.files)
        ranges |= shares([one for one in parsers if one.is_frame], asked.frames)
    rows = measure(ranges, asked.seed)
    if asked.output is not None:
        told = {"seed": asked.seed, "limits": limits, "parsers": rows}
        asked.output.write_text(json.dumps(told, indent=1) + "\n")
    sys.exit(any(failed(row) for row in rows))


def failed(row: dict[str, Any]) -> bool:
    """Return True if an input was neither accepted nor refused, or took too much memory."""
    return row["tried"] > row["accepted"] + row["refused"] or row["peak_nbytes"] > MEMORY_NBYTES


def line(row: dict[str, Any]) -> str:
    """Return the counts of a parser on one line."""
    others = ", ".join(f"{row[key]} {key}" for key in ("unclear", "crashed", "hung", "killed"))
    good = ", ".join(f"{row[key]:,} {key}" for key in ("tried", "refused", "accepted"))
    most = f"at most {row['longest_s']} s and {row['peak_nbytes'] / 2**20:.0f} MiB more"
    return f"{row['parser']}: {good}, {others}; {most}; {row['seconds']} s in all"


if __name__ == "__main__":
    main()
