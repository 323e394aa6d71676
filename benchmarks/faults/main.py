"""Faults: what workers, files and signals do to somebody else's training.

    python benchmarks/faults/main.py [lies] [loop] [files] [frames] [--quick]

`lies`: workers that have the keys send what they should not. `loop`: signals and cut connections at
random moments. `files` and `frames`: mutated input of every parser. Each prints the seed of what
goes wrong as it happens. With --quick a few of each show that everything works.
"""

import os
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # GPUs are for benchmarks/gpu
os.environ["OMP_NUM_THREADS"] = "1"

import fuzz  # noqa: E402
import lies  # noqa: E402
import loop  # noqa: E402
import tables  # noqa: E402
from fuzzing.child import CPU_S, MEMORY_NBYTES  # noqa: E402

import parts  # noqa: E402

_SEED, _MOST_S = 1, 7200.0


def _lies(quick: bool) -> dict[str, Any]:
    return lies.measure(20 if quick else 2000, _SEED)


def _loop(quick: bool) -> dict[str, Any]:
    return loop.measure(10 if quick else 500, _SEED, beside=2, most_s=_MOST_S)


def _files(quick: bool) -> dict[str, Any]:
    return _fuzzed(500 if quick else 100_000, is_frame=False)


def _frames(quick: bool) -> dict[str, Any]:
    return _fuzzed(1000 if quick else 1_000_000, is_frame=True)


def _fuzzed(count: int, *, is_frame: bool) -> dict[str, Any]:
    rows = fuzz.measure(count, _SEED, is_frame=is_frame)
    return {"seed": _SEED, "memory_nbytes": MEMORY_NBYTES, "seconds": CPU_S, "parsers": rows}


if __name__ == "__main__":
    parts.run(HERE, {"lies": _lies, "loop": _loop, "files": _files, "frames": _frames}, tables.of)
