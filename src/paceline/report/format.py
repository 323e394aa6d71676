"""Format numbers for people: three significant digits and a suitable unit.

A formatted number keeps the exact value, so that a table can be copied with full precision.
"""

from math import isfinite, nan
from typing import Self

from paceline.core.outcome import is_share

_SECONDS = (("ns", 1e-9, 999.5), ("us", 1e-6, 999.5), ("ms", 1e-3, 999.5), ("s", 1.0, 99.95))
_LEAST_S = 0.5e-12  # shorter times are rounding errors, and are shown as zero
_BYTES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


class Quantity(str):
    """A formatted number as a str, with the exact `value`; `unit` is the unit of `value`.

    Slicing, joining or formatting a Quantity returns a plain str.
    """

    __slots__ = ("unit", "value")
    value: float
    unit: str

    def __new__(cls, text: str, value: float, unit: str = "") -> Self:
        """Create the str `text`, and attach `value` and `unit`."""
        quantity = super().__new__(cls, text)
        quantity.value, quantity.unit = value, unit
        return quantity

    @property
    def exact(self) -> str:
        """The exact value as text, with twelve significant digits."""
        return f"{self.value:.12g}"


def duration(seconds: float) -> Quantity:
    """Format a time, for example as "1.23 ms", "45.6 s", "3 min 20 s" or "2 h 5 min".

    The rounding error is at most 0.5 %. Times below half a picosecond become "0 s".
    """
    return Quantity(_duration(seconds), seconds, "s")


def _duration(seconds: float) -> str:
    if not isfinite(seconds):
        return str(seconds)
    if abs(seconds) < _LEAST_S:
        return "0 s"
    if seconds < 0:
        return f"-{_duration(-seconds)}"
    for unit, factor, limit in _SECONDS:
        if seconds / factor < limit:
            return f"{_three_digits(seconds / factor)} {unit}"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 100:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours:,} h {minutes} min"


def nbytes(count: float) -> Quantity:
    """Format a number of bytes, for example as "512 B", "1.50 KiB" or "243 MiB".

    The rounding error is at most 0.5 %. A mean number of bytes may be below 1: "0.123 B".
    """
    size, exponent = abs(count), 0
    while size / 1024**exponent >= 1023.5 and exponent < len(_BYTES) - 1:
        exponent += 1
    text = f"{_three_digits(count / 1024**exponent)} {_BYTES[exponent]}"
    if not isfinite(count):
        text = str(count)
    elif size < 1024 and float(count).is_integer():
        text = f"{count:.0f} B"
    return Quantity(text, count, "bytes")


def share(fraction: float, decimals: int = 1, signed: bool = False) -> Quantity:
    """Format a fraction such as 0.1234 as "12.3 %", or "+12.3 %" if `signed`."""
    sign = "+" if signed else "-"
    percent = 100 * fraction
    text = f"{percent:{sign}z,.{decimals}f} %" if isfinite(fraction) else str(fraction)
    return Quantity(text, percent, "%")


def change_text(change: float | None) -> str:
    """Format a relative change: 0.123 as "+12.3 %", None as "-".

    A change of 9 or more is shown as the ratio of the values, 1 + `change`: 252 as "253 times".
    """
    if change is None:
        return "-"
    if change < 9:
        return share(change, signed=True)
    return Quantity(f"{number(1 + change)} times", 100 * change, "%")


def ratio(one: float, other: float) -> float:
    """Divide `one` by `other`; return nan if `other` is zero."""
    return one / other if other else nan


def optional_share(fraction: float | None) -> str:
    """Format a fraction in percent; return a dash for None."""
    return "-" if fraction is None else share(fraction)


def number(value: float) -> Quantity:
    """Format a number without a unit: "0.123", "12.3" or "12,345"."""
    text = _three_digits(value) if abs(value) < 99.95 else f"{value:,.0f}"
    return Quantity(text, value)


def counted(count: int, noun: str) -> str:
    """Format a count with its noun: "1 worker" or "2 workers"."""
    return f"{count} {noun}{'s' * (count != 1)}"


def _three_digits(value: float) -> str:
    """Format a number with three significant digits, or as an integer from 99.95 upwards."""
    size = abs(value)
    if size < 0.9995:
        return f"{value:.3g}"
    return f"{value:.{2 if size < 9.995 else 1 if size < 99.95 else 0}f}"


def score_text(name: str, value: float | None) -> str:
    """Format the value of the score `name`, or a dash for None.

    Scores that are fractions, such as accuracy, are in percent; others have four digits.
    """
    if value is None:
        return "-"
    return share(value, 2) if is_share(name) else f"{value:.4g}"


def loss_text(loss: float | None) -> str:
    """Format a loss with four decimals; return a dash for None."""
    return "-" if loss is None else f"{loss:.4f}"
