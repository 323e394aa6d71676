"""Hardware facts, and quantities with units: "1 Gbit/s", "24 GiB", "50 us"."""

import re
from collections.abc import Callable
from contextlib import suppress
from math import isfinite
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, Field

from paceline.core.errors import shown

Name = Annotated[
    str, Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9_.-]+$", examples=["gpu0"])
]
Source = Annotated[
    str,
    Field(
        min_length=1,
        max_length=2000,
        description="where the numbers come from",
        examples=["data sheet"],
    ),
]


class Fact(BaseModel, frozen=True, extra="forbid"):
    """Base of immutable records about a machine; unknown fields are errors."""


_QUANTITY = re.compile(r"([+-]?[0-9.]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z/]*)")
_DECIMAL = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}

_BYTES = {f"{prefix}B": factor for prefix, factor in (_DECIMAL | _BINARY).items()}
_BITS = {f"{prefix}bit": factor / 8 for prefix, factor in _DECIMAL.items()}
_BYTES_PER_S = {f"{unit}/s": factor for unit, factor in (_BYTES | _BITS).items()}
_FLOPS_PER_S = {f"{prefix}flop/s": factor for prefix, factor in _DECIMAL.items()}
_VALUES_PER_S = {f"{prefix}value/s": factor for prefix, factor in _DECIMAL.items()}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


def _parser(units: dict[str, float], example: str) -> Callable[[object], float]:
    """Return a parser into base units; plain numbers are in base units."""

    def parse(text: object) -> float:
        if isinstance(text, int | float) and not isinstance(text, bool):
            return float(text)
        match = _QUANTITY.fullmatch(text.strip()) if isinstance(text, str) else None
        if match is not None and match[2] in units:
            with suppress(ValueError):  # the pattern also matches texts such as "1.2.3"
                quantity = float(match[1]) * units[match[2]]
                if isfinite(quantity):
                    return quantity
        raise ValueError(f"must be a quantity such as {example!r} (got {shown(text)})")

    return parse


_MOST = 1e30  # upper limit, so that products of quantities stay finite
parse_bytes = _parser(_BYTES, "24 GiB")
Bytes = Annotated[float, BeforeValidator(parse_bytes), Field(le=_MOST, examples=["24 GiB"])]
BytesPerSecond = Annotated[
    float,
    BeforeValidator(_parser(_BYTES_PER_S, "1 Gbit/s")),
    Field(le=_MOST, examples=["1 Gbit/s"]),
]
FlopsPerSecond = Annotated[
    float,
    BeforeValidator(_parser(_FLOPS_PER_S, "9.3 Tflop/s")),
    Field(le=_MOST, examples=["9.3 Tflop/s"]),
]
ValuesPerSecond = Annotated[
    float, BeforeValidator(_parser(_VALUES_PER_S, "1.6 Gvalue/s")), Field(examples=["1.6 Gvalue/s"])
]
Seconds = Annotated[
    float, BeforeValidator(_parser(_SECONDS, "50 us")), Field(le=_MOST, examples=["50 us"])
]
