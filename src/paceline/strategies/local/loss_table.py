"""Estimate the steps that local updates need to reach a loss, from similar measured runs."""

import tomllib
from dataclasses import replace
from functools import cache
from importlib import resources
from math import log2
from statistics import median
from typing import Annotated

from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass

from paceline.core.rounds import Outer
from paceline.core.strategy import StepsToLoss
from paceline.core.wire_format import wire_format
from paceline.core.workload import Workload
from paceline.strategies.local.config import Local

# A row applies up to these ratios (log2) between row and run: the first is the ratio of parameters,
# the second the ratio of steps per round and the ratio of workers.
_NEAR_MODEL, _NEAR = 2.0, 1.0
_Count = Annotated[int, Field(ge=1)]
_Steps = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Row:
    """A measurement of the steps to a loss (benchmarks/local/steps_to_loss.py).

    `bits`: fewest bits per value of an outer gradient. `num_steps`: steps of synchronous training
    to the loss. `steps`: steps of local updates, divided by `num_steps`; the median of `seeds`
    runs. `low`, `high`: the range of these runs.
    """

    parameters: _Count
    sync_every: _Count
    delay: Annotated[int, Field(ge=0)]
    outer: Outer
    workers: _Count
    bits: _Count
    num_steps: _Count
    steps: _Steps
    low: _Steps
    high: _Steps
    seeds: _Count
    model: str


@cache
def rows() -> tuple[Row, ...]:
    """Read all rows of loss_table.toml."""
    file = resources.files(__package__).joinpath("loss_table.toml")
    found = tomllib.loads(file.read_text(encoding="utf-8")).get("rows", [])
    return TypeAdapter(tuple[Row, ...]).validate_python(found)


def variants(workers: int) -> list[Local]:
    """Return the default and all measured configurations, with this number of workers."""
    usual = Local(workers=workers)
    measured = (
        replace(usual, sync_every=row.sync_every, delay=row.delay, outer=row.outer)
        for row in rows()
    )
    return list(dict.fromkeys([usual, *measured]))


def steps_to_loss(workload: Workload, config: Local) -> StepsToLoss | None:
    """Estimate the steps of local updates to a loss, divided by those of synchronous training.

    Returns None if no row of the table applies.
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
    """Return True if the row applies to this model size and this configuration.

    The outer step must be the same, and the row's exchanges at most as precise.
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
