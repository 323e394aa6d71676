"""Steps to a loss of local updates, from the table of our own measurements beside this file.

A row is near a configuration if its model has at most four times or a quarter of the parameters,
and its rounds at most twice or half of the steps and the workers, with the same outer step,
and no larger part of a round passes while an exchange travels.
"""

import tomllib
from collections.abc import Sequence
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

_NEAR_MODEL, _NEAR = 2.0, 1.0  # doublings
_Count = Annotated[int, Field(ge=1)]
_Steps = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Row:
    """A measurement (benchmarks/local/steps_to_loss.py).

    A model of so many `parameters` on so many `workers`, in rounds of `sync_every` steps of which
    `delay` pass while an exchange travels, with the step `outer` on outer gradients of `bits` or
    more a value, needs `steps` times as many steps as synchronous training of `num_steps`: the
    median of `seeds`, which lie from `low` to `high`.
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
    """Return the rows of the table; pydantic's ValidationError names what is wrong with one."""
    file = resources.files(__package__).joinpath("loss_table.toml")
    found = tomllib.loads(file.read_text(encoding="utf-8")).get("rows", [])
    return TypeAdapter(tuple[Row, ...]).validate_python(found)


def variants(workers: int) -> list[Local]:
    """Return all rounds whose loss was measured, the default ones first."""
    usual = Local(workers=workers)
    measured = (
        replace(usual, sync_every=row.sync_every, delay=row.delay, outer=row.outer)
        for row in rows()
    )
    return list(dict.fromkeys([usual, *measured]))


def steps_to_loss(workload: Workload, config: Local) -> StepsToLoss | None:
    """Return the steps to a loss of a model; None if nothing near was measured."""
    return estimate(workload.num_parameters, config, rows())


def estimate(num_parameters: int, config: Local, among: Sequence[Row]) -> StepsToLoss | None:
    """Return the steps to a loss by the rows that are near."""
    near = [row for row in among if _is_near(row, num_parameters, config)]
    if config.workers == 1 or not near:
        return None
    models = dict.fromkeys(
        f"{row.model} ({row.num_steps:,} steps, {row.seeds} seed{'s' * (row.seeds > 1)})"
        for row in near
    )
    return StepsToLoss(
        median=median(row.steps for row in near),
        low=min(row.low for row in near),
        high=max(row.high for row in near),
        measured_on=" and ".join(models),
    )


def _is_near(row: Row, num_parameters: int, config: Local) -> bool:
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
