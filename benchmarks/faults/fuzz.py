"""Fuzz the parsers of files and frames within limits of memory and time.

    python fuzz.py PARSER SEED COUNT FILE

parses changed inputs in a process that ends if an input exceeds its limits. FILE contains the
current input; `measure`, which starts such processes, reads it if one dies. It counts each parser's
inputs: accepted, refused with one clear line, unclear (an error of several lines, or no result),
crashed, hung, and killed (SIGKILL). `peak_nbytes` is the largest growth of peak memory in a
process that ran the parser.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import seed as seeded

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1] / "tests")]

from fuzzing import files, wire  # noqa: E402

from attempt import peak_nbytes  # noqa: E402

PARSERS = {one.name: one for one in (*files.PARSERS, *wire.PARSERS)}
SEED = 1
CPU_S, WALL_S = 5.0, 60.0  # limits of an input; WALL_S allows for a busy machine
MEMORY_NBYTES = 2**29  # above the memory in use before the first input
_AT_ONCE = 10_000  # inputs per process: Hypothesis uses memory for each input
_ENDS = {-signal.SIGPROF: "hung", -signal.SIGALRM: "hung", -signal.SIGKILL: "killed"}
KINDS = ("accepted", "refused", "unclear", "crashed", "hung", "killed")
_ALONE = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def measure(names: tuple[str, ...], count: int) -> dict[str, Any]:
    """Fuzz parsers with `count` inputs in all; return the limits and each parser's counts."""
    whole = sum(PARSERS[name].weight for name in names)
    rows = []
    for name in names:
        rows.append(_fuzzed(name, round(PARSERS[name].weight / whole * count)))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    limits = {"memory_nbytes": MEMORY_NBYTES, "seconds": CPU_S}
    return {"seed": SEED, **limits, "parsers": rows}


def _fuzzed(name: str, count: int) -> dict[str, Any]:
    """Fuzz one parser with `count` inputs; return its counts and faults."""
    row: dict[str, Any] = {"parser": name, **dict.fromkeys(KINDS, 0), "faults": []}
    row |= {"peak_nbytes": 0, "longest_s": 0.0}
    for first in range(0, count, _AT_ONCE):
        found = _in_a_process(name, SEED + first, min(_AT_ONCE, count - first))
        row["faults"] += found.pop("faults")
        for key in ("peak_nbytes", "longest_s"):
            row[key] = max(row[key], found.pop(key, 0))
        for key, number in found.items():
            row[key] += number
    return row | {"tried": sum(row[kind] for kind in KINDS)}


def _in_a_process(name: str, seed: int, count: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        at_work = Path(scratch) / "at-work"
        done = subprocess.run(
            [sys.executable, __file__, name, str(seed), str(count), str(at_work)],
            env=os.environ | _ALONE | {"TMPDIR": scratch},
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
        return {_ENDS.get(done.returncode, "crashed"): 1, "faults": [fault]}


def main(name: str, seed: int, count: int, at_work: Path) -> None:
    """Parse inputs until one is neither accepted nor refused; print the counts as JSON."""
    parser, counts = PARSERS[name], Counter[str]()
    longest_s, faults = 0.0, []
    with tempfile.TemporaryDirectory() as made:
        seeds = parser.seeds(Path(made))
        folder = Path(made) / "input"
        folder.mkdir()
        for data in seeds:  # completes lazy imports before memory is measured
            if (bad := parser.verdict(data, folder))[0] != "accepted":
                raise SystemExit(f"{name}: the parser must accept a valid input: {bad}")
        before = peak_nbytes(os.getpid())
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + 2 * MEMORY_NBYTES  # part of it is never touched
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

        @seeded(seed)
        @settings(
            max_examples=count,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(parser.inputs(seeds))
        def parsed(data: bytes) -> None:
            nonlocal longest_s
            at_work.write_bytes(data)
            # The signals' default action ends the process, even inside C code.
            signal.setitimer(signal.ITIMER_PROF, CPU_S)
            signal.setitimer(signal.ITIMER_REAL, WALL_S)
            began_s = time.process_time()
            what, text = parser.verdict(data, folder)
            longest_s = max(longest_s, time.process_time() - began_s)
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
            counts[what] += 1
            assert what in ("accepted", "refused"), f"{what}: {text}"

        try:
            parsed()
        except AssertionError as error:  # of the smallest failing input that Hypothesis found
            faults.append(str(error))
    peak = max(0, peak_nbytes(os.getpid()) - before)
    print(json.dumps({**counts, "faults": faults, "peak_nbytes": peak, "longest_s": longest_s}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
