"""Measure the time of `paceline --help`, and of plans for machines from machines/."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from figures import spread

_COMMANDS = {
    "paceline --help": ("--help",),
    "paceline plan alexnet --machine two-hosts-gigabit": (
        *("plan", "alexnet", "--machine", "two-hosts-gigabit"),
    ),
    "the same of 16,384 workers": (
        *("plan", "alexnet", "--machine", "cluster-16384", "--workers", "16384"),
        *("--batch-size", "262144"),
    ),
}
_REPEATS, _QUICK_REPEATS = 9, 2


def commands(quick: bool) -> dict[str, Any]:
    """Return the CPU time and the elapsed time of each command."""
    count = _QUICK_REPEATS if quick else _REPEATS
    return {name: _measured(words, count) for name, words in _COMMANDS.items()}


def _measured(words: tuple[str, ...], count: int) -> dict[str, Any]:
    taken = [_once(words) for _ in range(count)]
    processor, elapsed = zip(*taken, strict=True)
    return {"processor_s": spread(processor), "elapsed_s": spread(elapsed)}


def _once(words: tuple[str, ...]) -> tuple[float, float]:
    """Return a command's CPU time and elapsed time in seconds."""
    program = Path(sys.executable).with_name("paceline")
    began_s, before = time.monotonic(), os.times()
    subprocess.run([program, *words], stdout=subprocess.DEVNULL, timeout=600.0, check=True)
    after = os.times()
    used_s = after.children_user - before.children_user
    used_s += after.children_system - before.children_system
    return used_s, time.monotonic() - began_s
