"""Field types of machine files: names, and quantities with units such as "1 Gbit/s" or "50 us"."""

import re
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from math import inf, isfinite
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field, PlainSerializer, SerializationInfo

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
_DECIMAL = {"P": 1e15, "T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3, "": 1.0}
_BINARY = {"Ti": 2.0**40, "Gi": 2.0**30, "Mi": 2.0**20, "Ki": 2.0**10}
_SECONDS = {"": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_MOST_DIGITS = 17  # so many significant digits distinguish any two float64 numbers


def _units(unit: str, prefixes: dict[str, float], factor: float = 1.0) -> dict[str, float]:
    return {f"{prefix}{unit}": times * factor for prefix, times in prefixes.items()}


_BYTES = _units("B", _DECIMAL | _BINARY)
_BYTES_PER_S = _units("B/s", _DECIMAL | _BINARY) | _units("bit/s", _DECIMAL, 1 / 8)


def _parser(units: dict[str, float], example: str) -> Callable[[object], float]:
    """Return a function that converts a quantity such as "50 us" to base units.

    A number without a unit is in base units. Other values raise ValueError with the `example`.
    """

    def parse(text: object) -> float:
        if isinstance(text, int | float) and not isinstance(text, bool):
            return float(text)
        match = _QUANTITY.fullmatch(text.strip()) if isinstance(text, str) else None
        if match is not None and match[2] in units:
            with suppress(ValueError):  # the pattern also matches "1.2.3", which is no number
                quantity = float(match[1]) * units[match[2]]
                if isfinite(quantity):
                    return quantity
        raise ValueError(f"must be a quantity such as {example!r} (got {shown(text)})")

    return parse


WITH_UNITS = "with units"  # context of `model_dump` in which quantities become text with units


def _of(unit: str, units: dict[str, float], example: str, most: float | None = 1e30) -> list[Any]:
    """Return how pydantic reads, checks and writes a quantity in base unit `unit`.

    `model_dump` with context `WITH_UNITS` writes a quantity as `quantity` does. `most`: upper
    limit, so that products of quantities stay finite.
    """

    def write(value: float, info: SerializationInfo) -> Any:
        text = quantity(value, unit) if info.context == WITH_UNITS else None
        return float(value) if text is None else text

    read = BeforeValidator(_parser(units, example))
    return [read, Field(le=most, examples=[example]), PlainSerializer(write)]


parse_bytes = _parser(_BYTES, "24 GiB")
Bytes = Annotated[float, *_of("B", _BYTES, "24 GiB")]
BytesPerSecond = Annotated[float, *_of("B/s", _BYTES_PER_S, "1 Gbit/s")]
FlopsPerSecond = Annotated[float, *_of("flop/s", _units("flop/s", _DECIMAL), "9.3 Tflop/s")]
ValuesPerSecond = Annotated[
    float, *_of("value/s", _units("value/s", _DECIMAL), "1.6 Gvalue/s", most=None)
]
Seconds = Annotated[float, *_of("s", _units("s", _SECONDS), "50 us")]


def quantity(value: float, unit: str) -> str | None:
    """Format a value with its unit and the fewest digits that are exact, such as "1.6 GB/s".

    Returns None if no text with a unit is exact, as for zero, infinity and very small values.
    """
    prefixes = [_prefix(value, unit)]
    if unit == "B":  # memory sizes may be multiples of powers of two
        prefixes += [one for one in _BINARY.items() if one[1] <= value][:1]
    texts = []
    for prefix, factor in prefixes:
        if factor <= value < inf:
            numbers = (f"{value / factor:.{digits}g}" for digits in range(1, _MOST_DIGITS + 1))
            # A machine file is easier to read without exponents.
            exact = (n for n in numbers if "e" not in n and float(n) * factor == value)
            texts += [f"{number} {prefix}{unit}" for number in islice(exact, 1)]
    return min(texts, key=len, default=None)


def rounded(value: float, unit: str) -> str:
    """Format a value with its unit, rounded to three digits."""
    prefix, factor = _prefix(value, unit)
    return f"{float(f'{value / factor:.3g}'):g} {prefix}{unit}"


def as_rounded(value: float, unit: str) -> float:
    """Round a value to three digits in the unit in which `rounded` formats it."""
    factor = _prefix(value, unit)[1]
    return float(f"{value / factor:.3g}") * factor


def _prefix(value: float, unit: str) -> tuple[str, float]:
    """Return a prefix and its factor, the largest up to `value`; if none, the smallest prefix."""
    *known, smallest = (_SECONDS if unit == "s" else _DECIMAL).items()
    return next((one for one in known if one[1] <= value), smallest)
