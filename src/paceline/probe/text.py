"""Machines as the text of machine files, which `machine_file.read_machine` reads back."""

import json
import re
from collections.abc import Iterator
from math import inf
from typing import Any

from paceline.core.facts import Fact
from paceline.core.machine import Machine

_DECIMAL = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0))
_BINARY = (("Ti", 2.0**40), ("Gi", 2.0**30), ("Mi", 2.0**20), ("Ki", 2.0**10))
_SECONDS = (("", 1.0), ("m", 1e-3), ("u", 1e-6), ("n", 1e-9))
_MOST_DIGITS = 17  # of a float64
# The end of a field's name says its unit; the longest that fits counts.
_UNITS = {
    "values_per_s": "value/s",
    "flops_per_s": "flop/s",
    "bytes_per_s": "B/s",
    "_bytes": "B",
    "_s": "s",
}


def machine_text(machine: Machine, comment: str = "") -> str:
    """Return the TOML text that describes exactly this machine, in ASCII.

    Lines of `comment` stand above it. Fields that have their default are left out.
    """
    lines = [f"# {_ascii(line)}".rstrip() for line in comment.splitlines()]
    tables = []
    for name, value in _given(machine):
        if isinstance(value, tuple) and isinstance(value[0], Fact):
            for fact in value:
                tables += ["", f"[[{name}]]", *_fields(fact)]
        else:
            lines.append(f"{name} = {_literal(name, value)}")
    return "\n".join(lines + tables) + "\n"


def quantity(value: float, unit: str) -> str | None:
    """Return the value with its unit, such as "1.6 GB/s", in the fewest digits that mean it.

    None if that cannot be exact, or for what is zero, infinite, or too small for any prefix.
    """
    prefixes = [_prefix(value, unit)]
    if unit == "B":  # as memory is sold
        prefixes += [one for one in _BINARY if one[1] <= value][:1]
    numbers = [(_exact(value, factor), prefix) for prefix, factor in prefixes]
    texts = [f"{number} {prefix}{unit}" for number, prefix in numbers if number is not None]
    return min(texts, key=len, default=None)


def _exact(value: float, factor: float) -> str | None:
    """Return the shortest number that, times the factor, is the value."""
    if not factor <= value < inf:
        return None
    numbers = (f"{value / factor:.{digits}g}" for digits in range(1, _MOST_DIGITS + 1))
    # 1e+02 is shorter than 103, but no easier to read
    return next((n for n in numbers if "e" not in n and float(n) * factor == value), None)


def rounded(value: float, unit: str) -> str:
    """Return the value with its unit, in three digits."""
    prefix, factor = _prefix(value, unit)
    return f"{_three_digits(value / factor):g} {prefix}{unit}"


def as_rounded(value: float, unit: str) -> float:
    """Return the value that `rounded` shows."""
    factor = _prefix(value, unit)[1]
    return _three_digits(value / factor) * factor


def _prefix(value: float, unit: str) -> tuple[str, float]:
    """Return the largest prefix that the value exceeds, or the smallest, and its factor."""
    known = _SECONDS if unit == "s" else _DECIMAL
    return next((one for one in known if one[1] <= value), known[-1])


def _three_digits(value: float) -> float:
    return float(f"{value:.3g}")


def _fields(fact: Fact) -> Iterator[str]:
    """Yield a line for each field; of a codec's speed, which is in a line of its own, too."""
    for name, value in _given(fact):
        if isinstance(value, dict):
            for key, speed in value.items():
                inner = ", ".join(f"{field} = {_literal(field, v)}" for field, v in _given(speed))
                yield f"{name}.{key} = {{ {inner} }}"
        else:
            yield f"{name} = {_literal(name, value)}"


def _given(fact: Fact) -> Iterator[tuple[str, Any]]:
    for name, field in type(fact).model_fields.items():
        value = getattr(fact, name)
        if field.is_required() or value != field.default:
            yield name, value


def _literal(field: str, value: Any) -> str:
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, tuple):
        return f"[{', '.join(_literal(field, item) for item in value)}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    unit = next(unit for end, unit in _UNITS.items() if field.endswith(end))
    text = quantity(value, unit)
    return repr(value) if text is None else _string(text)


def _string(text: str) -> str:
    """Return a basic string of TOML: JSON's, but for a delete and what is beyond ASCII."""
    return _ascii(json.dumps(text, ensure_ascii=False))


def _ascii(text: str) -> str:
    return re.sub(r"[^ -~]", lambda match: f"\\U{ord(match[0]):08x}", text)
