"""Estimate the steps that local updates need to reach a loss, from similar measured runs."""

import tomllib
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from math import log2
from statistics import median

from paceline.core.rounds import Outer
from paceline.core.strategy import StepsToLoss
from paceline.core.wire_format import wire_format
from paceline.core.workload import Workload
from paceline.strategies.local.config import Local

# A row of the table applies to a run if their numbers of parameters differ at most by the factor
# 2**_NEAR_MODEL, and their numbers of workers and of steps per round at most by 2**_NEAR.
_NEAR_MODEL, _NEAR = 2.0, 1.0


@dataclass(frozen=True)
class Row:
    """A measurement of the steps until a loss is reached (benchmarks/local/steps_to_loss.py).

    `parameters`: number of the model's parameters. `bits`: the fewest bits per value with which
    outer gradients were exchanged. `num_steps`: steps that synchronous training needs. `steps`:
    steps that local updates need, divided by `num_steps`; the median of `seeds` runs. `low`,
    `high`: the range of these runs.
    """

    parameters: int
    sync_every: int
    delay: int
    outer: Outer
    workers: int
    bits: int
    num_steps: int
    steps: float
    low: float
    high: float
    seeds: int
    model: str


@cache
def rows() -> tuple[Row, ...]:
    """Read all rows of loss_table.toml."""
    file = resources.files(__package__).joinpath("loss_table.toml")
    found = tomllib.loads(file.read_text(encoding="utf-8")).get("rows", [])
    return tuple(Row(**row) for row in found)


def variants(workers: int) -> list[Local]:
    """Return the default configuration, and all configurations in the table, for `workers`."""
    usual = Local(workers=workers)
    measured = (
        replace(usual, sync_every=row.sync_every, delay=row.delay, outer=row.outer)
        for row in rows()
    )
    return list(dict.fromkeys([usual, *measured]))


def steps_to_loss(workload: Workload, config: Local) -> StepsToLoss | None:
    """Estimate the steps that local updates need to a loss, relative to synchronous SGD.

    Returns None for a single worker, or if no row of the table applies.
    """
    near = [row for row in rows() if _is_near(row, workload.num_parameters, config)]
    if config.workers == 1 or not near:
        return None
    models = (
        f"{row.model} ({row.num_steps:,} steps, {row.seeds} seed{'s' * (row.seeds > 1)})"
        for row in near
    )
    low, high = min(row.low for row in near), max(row.high for row in near)
    measured_on = " and ".join(dict.fromkeys(models))
    return StepsToLoss(median(row.steps for row in near), low, high, measured_on)


def _is_near(row: Row, num_parameters: int, config: Local) -> bool:
    """Return whether the row applies to a model of this size and this configuration.

    Requires the same outer step, and similar numbers of parameters, workers and steps per round.
    The run's delay, relative to its round, must not exceed the row's. The run's codec must send
    every value, with at least as many bits as in the row.
    """
    outer = config.outer, config.outer_learning_rate, config.outer_momentum, config.mixing
    if outer != (row.outer, None, None, None):
        return False
    if config.delay * row.sync_every > row.delay * config.sync_every:
        return False
    form = None if config.codec is None else wire_format(config.codec)
    if form is not None and (form.share is not None or form.value_bits < row.bits):
        return False
    pairs = (row.sync_every, config.sync_every), (row.workers, config.workers)
    is_near_model = abs(log2(row.parameters / num_parameters)) <= _NEAR_MODEL
    return is_near_model and all(abs(log2(one / other)) <= _NEAR for one, other in pairs)
