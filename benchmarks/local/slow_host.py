"""Compare a fast host alone with the same host and a four times slower one."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any, TypeVar

from paceline.links.group import Group

SLOWER, ALONE = 4, "the fast host alone"
_Batch = TypeVar("_Batch")
Runs = dict[str, list[dict[str, float]]]


def in_turns(
    group: Group, names: Iterable[str], repeats: int, run: Callable[[str, int], dict[str, float]]
) -> Runs:
    """Run each name once per seed, in turns; the slow host skips the fast host's."""
    runs: Runs = {name: [] for name in names}
    for seed in range(repeats):
        for name, own in runs.items():
            group.barrier()
            if group.rank == 0 or name != ALONE:
                own.append(run(name, seed))
    group.barrier()
    return runs


def train(
    batches: Iterable[_Batch], step: Callable[[_Batch], None], num_steps: int, *, is_slow: bool
) -> float:
    """Run a step per batch, and return the seconds of all steps.

    On a slow host, each step is followed by a pause of three times the step's CPU time.
    """
    started_s = time.monotonic()
    for _, batch in zip(range(num_steps), batches, strict=False):
        busy_s = time.process_time()
        step(batch)
        if is_slow:
            time.sleep((SLOWER - 1) * (time.process_time() - busy_s))
    return time.monotonic() - started_s


def lines(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[tuple[str, ...]]:
    """Return table rows: tokens/s, speed relative to the fast host, seconds, and losses by seed."""
    speeds = {name: [one["tokens"] / one["seconds"] for one in own] for name, own in runs.items()}
    found = []
    for name, own in runs.items():
        times = sorted(a / b for a, b in zip(speeds[name], speeds[ALONE], strict=True))
        between = f" [{times[0]:.2f}, {times[-1]:.2f}]" if len(times) > 1 and name != ALONE else ""
        seconds = median(one["seconds"] for one in own)
        losses = " ".join(f"{one['loss']:.3f}" for one in own)
        speed = f"{median(speeds[name]):,.0f}", f"{median(times):.2f}{between}"
        found.append((name, *speed, f"{seconds:.1f}", losses))
    return found
