"""Measure the steps after which two hosts reach a lone host's loss.

A part is a GPT of a given size on the text of Python's library. A lone host trains for a fixed
number of steps. Each of two hosts uses the lone host's batch size, with local updates or exchanged
gradients. Runs of several lengths, each with a full schedule, show after how many steps two hosts
reach the lone host's loss. "free" exchanges unencoded gradients and needs the fewest steps. Seconds
are not measured here, but in `time_to_loss.py`.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from sized_gpt import test_loss

from figures import table

FREE = "free"
_HEADER = """\
# Steps of local updates to a loss, as times those of synchronous training of as large batches:
# read by loss_table.py. `python benchmarks/run.py local --fill` writes these rows."""
_FURTHEST = 1.1  # losses are extrapolated to this multiple of a run's length
PARAMETERS = {"0.1m": 120_576, "1m": 989_600, "10m": 10_795_008}


class Shape(NamedTuple):
    """Settings of local updates: steps per round, steps during an exchange, and outer optimizer."""

    sync_every: int
    delay: int = 0
    outer: str = "auto"

    @property
    def name(self) -> str:
        """The name in tables."""
        delay = f", delay {self.delay}" if self.delay else ""
        return f"local, H={self.sync_every}{delay}{', average' * (self.outer == 'average')}"


class Case(NamedTuple):
    """A model, a lone host's settings, and two hosts' runs; `lengths` are shares of `num_steps`."""

    model: str
    batch_size: int
    num_steps: int
    learning_rate: float
    lengths: Sequence[float]
    rounds: Sequence[Shape]
    seeds: Sequence[int]
    codecs: Sequence[str] = ("dynamic4",)


CASES: Mapping[str, Case] = {
    "0.1m": Case(
        *("tiny", 32, 1500, 0.003),
        lengths=(0.65, 0.85),
        rounds=(*map(Shape, (1, 5, 10, 30, 100, 500)), Shape(10, 2)),
        seeds=(0, 1, 2),
    ),
    "1m": Case(*("small", 16, 1500, 0.002), (0.65, 0.85), (Shape(10), Shape(30)), (0, 1), ()),
    "10m": Case(*("large", 4, 1000, 0.001), (0.65, 0.85), (Shape(10, 2, "average"),), (0,), ()),
}


SHAPES = {shape.name: shape for case in CASES.values() for shape in case.rounds}


def measure(case: Case, quick: bool) -> dict[str, Any]:
    """Return the test losses of all runs, by method, steps and seed."""
    ways: dict[str, Sequence[str]] = {FREE: ["--strategy=allreduce"]}
    for codec in case.codecs:
        ways[f"allreduce, {codec}"] = ["--strategy=allreduce", f"--codec={codec}"]
    for shape in case.rounds:
        settings = [f"--strategy-option={name}={value}" for name, value in shape._asdict().items()]
        ways[shape.name] = ["--strategy=local", *settings]
    seeds = case.seeds[:1] if quick else case.seeds
    lone = [_loss(case, [], 1, case.num_steps // (10 if quick else 1), seed) for seed in seeds]
    found: dict[str, dict[str, list[float]]] = {}
    for name, options in list(ways.items())[: 3 if quick else None]:
        for length in case.lengths[:1] if quick else case.lengths:
            steps = round(case.num_steps * length / (10 if quick else 1))
            losses = [_loss(case, options, 2, steps, seed) for seed in seeds]
            found.setdefault(name, {})[str(steps)] = losses
    return {"lone": lone, "num_steps": case.num_steps, "losses": found, **case._asdict()}


def _loss(case: Case, options: Sequence[str], workers: int, steps: int, seed: int) -> float:
    """Return the test loss at the end of a run, in nats per byte."""
    sizes = ("--workers", workers, "--batch-size", workers * case.batch_size)
    how = (*(options or ["--strategy=allreduce"]), "--learning-rate", case.learning_rate)
    return test_loss(case.model, *how, *sizes, steps=steps, seed=seed)


def steps_needed(losses: Mapping[str, Sequence[float]], goals: Sequence[float]) -> list[float]:
    """Return the steps to each seed's goal; infinite if over 1.1 times the longest run."""
    return [
        _crossing([(int(steps), own[seed]) for steps, own in losses.items()], goal)
        for seed, goal in enumerate(goals)
    ]


def _crossing(points: Sequence[tuple[int, float]], goal: float) -> float:
    """Interpolate the steps at which the loss reaches the goal; extrapolate at most a tenth."""
    lines = list(pairwise(sorted(points)))
    last = max(points)[0]
    for (left, high), (right, low) in lines:
        if (low <= goal or right == last) and low < high:
            found = left + (high - goal) / (high - low) * (right - left)
            return max(found, left / _FURTHEST) if found <= _FURTHEST * last else float("inf")
    return float(last) if max(points)[1] <= goal else float("inf")


def text(part: str, figures: dict[str, Any]) -> str:
    """Return the table of a part."""
    lone, num_steps = figures["lone"], figures["num_steps"]
    free = median(steps_needed(figures["losses"][FREE], lone))
    lines = []
    for name, losses in figures["losses"].items():
        needed = steps_needed(losses, lone)
        middle = median(needed)
        shown = "not reached" if middle == float("inf") else f"{middle:,.0f}"
        between = f" [{min(needed):,.0f}, {max(needed):,.0f}]" if len(needed) > 1 else ""
        row = (name, f"{shown}{between}", f"{middle / num_steps:.2f}", f"{middle / free:.2f}")
        lines.append(row)
    of_steps = ("steps to the lone host's loss", f"of its {num_steps}", "of free's")
    return table("", (f"{part}: two hosts", *of_steps), lines)


def loss_table(figures: Mapping[str, Any]) -> str:
    """Return strategies/local/loss_table.toml, with the rows of all measured parts."""
    rows = [row for part in CASES if part in figures for row in _toml_rows(part, figures[part])]
    return "\n".join([_HEADER, *rows])


def _toml_rows(part: str, figures: dict[str, Any]) -> Iterator[str]:
    """Yield TOML rows: steps of local updates to the loss, relative to free."""
    free = steps_needed(figures["losses"][FREE], figures["lone"])
    for name, losses in figures["losses"].items():
        needed = steps_needed(losses, figures["lone"])
        if name.startswith("local") and max(*needed, *free) < float("inf"):
            shape = SHAPES[name]
            times = [own / other for own, other in zip(needed, free, strict=True)]
            yield (
                f"[[rows]]\nparameters = {PARAMETERS[part]}\n"
                f'sync_every = {shape.sync_every}\ndelay = {shape.delay}\nouter = "{shape.outer}"\n'
                f"workers = 2\nbits = 4\nnum_steps = {round(median(free))}\n"
                f"steps = {median(times):.3f}\nlow = {min(times):.3f}\nhigh = {max(times):.3f}\n"
                f'seeds = {len(times)}\nmodel = "a GPT of {PARAMETERS[part]:,} parameters"\n'
            )
