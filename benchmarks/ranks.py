"""Start ranks that measure, pin them to cores, and compare variants in alternating blocks."""

import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from figures import spread
from paceline.links.cores import physical_cores
from paceline.links.group import Group
from paceline.links.launch import launch
from paceline.links.processes import module_command

DEADLINE_S = 120.0
_USABLE = os.sched_getaffinity(0)
Blocks = Mapping[str, Sequence[Sequence[float]]]
T = TypeVar("T")


def on_ranks(
    folder: Path, part: str, num_ranks: int, quick: bool, num_gpus: int = 0, case: str | None = None
) -> dict[str, Any]:
    """Measure a part, a module in `folder`, with `num_ranks` ranks; return rank 0's figures.

    `num_gpus`: number of GPUs, which ranks share if there are more ranks; 0 for the CPU. `case`:
    passed to the part's `measure`.
    """
    with tempfile.TemporaryDirectory() as temporary:
        output = Path(temporary) / "figures.json"
        program = Path(__file__).with_name("rank.py")
        command = module_command(str(program), str(folder), part, str(output))
        options = [f"--gpus={num_gpus}", *(["--quick"] if quick else [])]
        options += [] if case is None else [f"--case={case}"]
        launch([*command, *options], num_ranks)
        figures: dict[str, Any] = json.loads(output.read_text())
    return figures


def pin() -> None:
    """Pin this rank to one core; ranks share cores if there are too few."""
    os.sched_setaffinity(0, {cpu_of(int(os.environ["LOCAL_RANK"]))})


def cpu_of(rank: int) -> int:
    """Return the number of the CPU to which a rank is pinned."""
    cores = physical_cores(_USABLE)
    return cores[rank % len(cores)][0]


@contextmanager
def unpinned() -> Iterator[None]:
    """Let this process, and processes started in the block, use all cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, _USABLE)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@dataclass(frozen=True)
class Variant:
    """A variant to measure: `run(n)` runs it n times and returns each run's seconds.

    Only the first `num_ranks` ranks run it; the others sleep meanwhile.
    """

    name: str
    run: Callable[[int], list[float]]
    num_ranks: int


def timed(
    step: Callable[[], object],
    num_warm_up: int = 0,
    synchronize: Callable[[], None] = lambda: None,
) -> Callable[[int], list[float]]:
    """Return a function that runs a step repeatedly and returns the seconds of each run."""

    def run(num_times: int) -> list[float]:
        for _ in range(num_warm_up):
            step()
        synchronize()
        marks = [time.perf_counter()]
        for _ in range(num_times):
            step()
            synchronize()
            marks.append(time.perf_counter())
        return [end - start for start, end in pairwise(marks)]

    return run


def alternate(
    variants: Sequence[Variant], group: Group, num_blocks: int, num_times: int
) -> dict[str, list[list[float]]]:
    """Return the seconds of each variant's blocks, as measured on this rank.

    Each round runs one block of each variant in a new random order, so that other load on the
    machine affects all variants alike.
    """
    blocks: dict[str, list[list[float]]] = {variant.name: [] for variant in variants}
    for variant in in_turns(variants, num_blocks):
        group.barrier()
        if group.rank < variant.num_ranks:
            blocks[variant.name].append(variant.run(num_times))
    group.barrier()
    return blocks


def in_turns(compared: Iterable[T], num_rounds: int) -> Iterator[T]:
    """Yield every item once per round, in random orders shared by all processes."""
    every, order = list(compared), random.Random(0)  # noqa: S311 - no secret
    for _ in range(num_rounds):
        yield from order.sample(every, len(every))


def rounds_within(
    budget_s: float, variants: Sequence[Variant], group: Group, num_times: int, most: int
) -> int:
    """Measure one round; return how many rounds fit into `budget_s`, from 2 to `most`.

    All ranks return the same number.
    """
    blocks = alternate(variants, group, 1, num_times)
    own_s = sum(sum(chain.from_iterable(times)) for times in blocks.values())
    return max(2, min(most, int(budget_s / max(group.gather(own_s)))))


def compare(blocks: Blocks, baseline: str) -> dict[str, dict[str, Any]]:
    """Return each variant's seconds, and compare them with the baseline: overall and by block."""
    middle = {name: median(chain.from_iterable(times)) for name, times in blocks.items()}
    rows = {}
    for name, times in blocks.items():
        pairs = list(zip(times, blocks[baseline], strict=True))
        rows[name] = {
            "seconds": spread(list(chain.from_iterable(times))),
            "ratio_of_medians": middle[name] / middle[baseline],
            "ratio": spread([median(own) / median(other) for own, other in pairs]),
            "difference_s": spread([median(own) - median(other) for own, other in pairs]),
        }
    return rows
