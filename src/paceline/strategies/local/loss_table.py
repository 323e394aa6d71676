"""What is known of the cost in loss of rounds of inner steps: our own measurements, as a range.

The rows are those of `loss_table.toml`. A row is near a configuration if it has as many bits a
value, the same outer step, and at most twice or half as many steps of a round, and workers.
"""

import tomllib
from collections.abc import Sequence
from functools import cache
from importlib import resources
from math import log2
from typing import Annotated

from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass

from paceline.core.wire_format import wire_format
from paceline.strategies.local.config import Local

_FLOAT32_BITS = 32
_NEAR = 1.0  # doublings
_Count = Annotated[int, Field(ge=1)]
_Finite = Annotated[float, Field(allow_inf_nan=False)]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class LossRow:
    """One measurement of the cost in loss.

    Runs of as many `seeds`, in rounds of `sync_every` steps on so many `workers`, with outer
    gradients of `bits` a value, after so many `tokens` (or samples): `difference` is their mean
    loss minus that of synchronous training with the same seeds, `spread` the largest distance of
    one seed's difference from it. The outer step is the usual one where none is named.
    """

    sync_every: _Count
    workers: _Count
    bits: _Count
    difference: _Finite
    spread: Annotated[_Finite, Field(ge=0)]
    seeds: _Count
    model: str
    tokens: _Count
    outer_learning_rate: _Finite | None = None
    outer_momentum: _Finite | None = None


@cache
def loss_rows() -> tuple[LossRow, ...]:
    """Return the rows of the table; pydantic's ValidationError names what is wrong with one."""
    file = resources.files(__package__).joinpath("loss_table.toml")
    rows = tomllib.loads(file.read_text(encoding="utf-8")).get("rows", [])
    return TypeAdapter(tuple[LossRow, ...]).validate_python(rows)


def caveat(config: Local) -> str:
    """Return what is known of the cost in loss of a configuration, from the table."""
    return described(config, loss_rows())


def described(config: Local, rows: Sequence[LossRow]) -> str:
    """Return what rows say of a configuration's loss: a range with where it was measured."""
    form = None if config.codec is None else wire_format(config.codec)
    bits = _FLOAT32_BITS if form is None else form.value_bits
    workers = f"{config.workers} worker{'s' * (config.workers > 1)}"
    size = f"{bits} bit{'s' * (bits > 1)}"
    if form is not None and form.share is not None:  # a row is of codecs that send all values
        rows, size = (), form.name
    asked = f"rounds of {config.sync_every} steps on {workers} with {size}"
    near = [row for row in rows if row.bits == bits and _is_near(row, config)]
    if not near:
        return f"not the same training: nothing is known of the cost in loss of {asked}"
    low = min(row.difference - row.spread for row in near)
    high = max(row.difference + row.spread for row in near)
    measured = "; ".join(map(_where, near))
    return (
        f"not the same training: near {asked} the loss was {low:+.3f} to {high:+.3f} beside that "
        f"of synchronous training, which is no promise for another model ({measured})"
    )


def _outer(one: Local | LossRow) -> tuple[float | None, float | None]:
    return one.outer_learning_rate, one.outer_momentum


def _is_near(row: LossRow, config: Local) -> bool:
    if _outer(row) != _outer(config):
        return False
    pairs = (row.sync_every, config.sync_every), (row.workers, config.workers)
    return all(abs(log2(one / other)) <= _NEAR for one, other in pairs)


def _where(row: LossRow) -> str:
    return (
        f"{row.model}, rounds of {row.sync_every}, {row.workers} workers, {row.tokens:.3g} tokens, "
        f"{row.seeds} seeds"
    )
