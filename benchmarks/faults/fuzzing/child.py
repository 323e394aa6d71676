"""Parse changed inputs in a process that ends if an input exceeds its limits.

    python -m fuzzing.child PARSER SEED COUNT FILE

FILE contains the current input; the parent reads it if the process dies.
"""

import json
import os
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import seed as seeded

from attempt import peak_nbytes
from fuzzing.parser import Parser, parser_of

CPU_S, WALL_S = 5.0, 60.0  # limits of an input; WALL_S allows for a busy machine
MEMORY_NBYTES = 2**29  # above the memory in use before the first input


def main(name: str, seed: int, count: int, at_work: Path) -> None:
    """Parse inputs until one is neither accepted nor refused; print the counts as JSON."""
    parser = parser_of(name)
    with tempfile.TemporaryDirectory() as made:
        seeds = parser.seeds(Path(made))
        folder = Path(made) / "input"
        folder.mkdir()
        for data in seeds:  # completes lazy imports before memory is measured
            if (bad := parser.verdict(data, folder))[0] != "accepted":
                raise SystemExit(f"{name}: the parser must accept a valid input: {bad}")
        print(json.dumps(_counted(parser, seeds, seed, count, folder, at_work)))


def _counted(
    parser: Parser, seeds: list[bytes], seed: int, count: int, folder: Path, at_work: Path
) -> dict[str, object]:
    before = peak_nbytes(os.getpid())
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + 2 * MEMORY_NBYTES  # part of it is never touched
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    counts: Counter[str] = Counter()
    longest_s, fault = 0.0, None

    @seeded(seed)
    @settings(
        max_examples=count, database=None, deadline=None, suppress_health_check=list(HealthCheck)
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
        fault = str(error)
    peak = max(0, peak_nbytes(os.getpid()) - before)
    return {**counts, "fault": fault, "peak_nbytes": peak, "longest_s": longest_s}


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
