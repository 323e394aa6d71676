"""Parse many inputs in one process that dies of the one that takes too much memory or time."""

import json
import mmap
import os
import resource
import signal
import struct
import sys
import tempfile
import time
import traceback
from pathlib import Path

from fuzzing.all_parsers import parser_of
from fuzzing.parser import Parser
from paceline.core.errors import PacelineError

CPU_S, WALL_S = 5.0, 60.0  # of an input; other processes may have the processors meanwhile
MEMORY_NBYTES = 2**29  # above what the process has before the first input
_LONGEST = 4100  # characters of a line
_NUMBER = struct.Struct("<q")


class Progress:
    """The number of the input at work, in memory that outlives the process, for its parent."""

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, _NUMBER.size)

    def set(self, number: int) -> None:
        """Begin with an input."""
        _NUMBER.pack_into(self._memory, 0, number)

    @property
    def number(self) -> int:
        """The input at work, or the last one."""
        return int(_NUMBER.unpack_from(self._memory)[0])


def verdict(parser: Parser, data: bytes, folder: Path) -> tuple[str, str]:
    """Return "accepted", "refused", "unclear" or "crashed", and the error's text."""
    try:
        found = parser.parse(data, folder)
    except PacelineError as error:
        text = str(error)
        is_clear = 0 < len(text) <= _LONGEST and text.isprintable()
        return ("refused" if is_clear else "unclear"), text
    except Exception:
        return "crashed", traceback.format_exc()
    return ("unclear", "nothing came of it") if found is None else ("accepted", "")


def _peak_nbytes() -> int:
    """Return the most resident memory of this program; that of getrusage has its parent's, too."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def _virtual_nbytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def main(name: str, seed: int, first: int, last: int, progress_fd: int) -> None:
    """Parse the inputs from `first` to before `last`, and print a line of JSON for each fault."""
    parser, progress = parser_of(name), Progress(progress_fd)
    with tempfile.TemporaryDirectory() as made:
        seeds = parser.seeds(Path(made))
        folder = Path(made) / "input"
        folder.mkdir()
        for data in seeds:  # imports what it needs, before memory is measured
            progress.set(-1)
            if (bad := verdict(parser, data, folder))[0] != "accepted":
                raise SystemExit(f"{name}: a valid input is {bad}")
        before = _peak_nbytes()
        limit = _virtual_nbytes() + 2 * MEMORY_NBYTES  # not all of it is ever touched
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        counts = dict.fromkeys(("accepted", "refused", "unclear", "crashed"), 0)
        nbytes = longest_ns = 0
        for number in range(first, last):
            data = parser.input(seeds, seed, number)
            nbytes += len(data)
            progress.set(number)
            # Default actions: nothing in C or Python can ignore them.
            signal.setitimer(signal.ITIMER_PROF, CPU_S)
            signal.setitimer(signal.ITIMER_REAL, WALL_S)
            began_ns = _cpu_ns()
            what, text = verdict(parser, data, folder)
            longest_ns = max(longest_ns, _cpu_ns() - began_ns)
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
            counts[what] += 1
            if what in ("unclear", "crashed"):
                _tell({"fault": what, "number": number, "text": text})
        peak = max(0, _peak_nbytes() - before)
        _tell(counts | {"nbytes": nbytes, "peak_nbytes": peak, "longest_s": longest_ns / 1e9})


def _cpu_ns() -> int:
    return time.process_time_ns()


def _tell(values: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(sys.argv[1], *map(int, sys.argv[2:]))
