"""Read JSON and TOML from files and peers, with limits on depth and numbers.

Functions return validated records, or raise InvalidInput. Before that, `paceline.links.files`
limits the length of files, and `paceline.rpc` the length of messages.
"""

import re
import tomllib
from contextlib import suppress
from math import isfinite
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, from_json

from paceline.core.errors import InvalidInput, shown

Text = bytes | bytearray | memoryview
MOST_DEPTH = 200  # maximum nesting of JSON; pydantic's parser has the same limit
_MOST_TOML_DEPTH = 32
LARGEST_INTEGER = 2**63 - 1
LARGEST_NUMBER = 1e40  # above float32's range; products of such numbers still fit float64
_MOST_PEER_NBYTES, _MOST_PEER_FIELDS = 32 << 20, 50_000  # limits of a record from a peer
_T = TypeVar("_T")
# Problems by pydantic's error type; errors of other types keep pydantic's message.
_PROBLEMS = {
    "missing": "is missing",
    "extra_forbidden": "is not known",
    "unexpected_keyword_argument": "is not known",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be {expected}",
    "enum": "must be {expected}",
    "finite_number": "must be a finite number",
    "bool_parsing": "must be true or false",
    "string_type": "must be text",
    **dict.fromkeys(("int_parsing", "int_type", "int_from_float"), "must be an integer"),
    **dict.fromkeys(("float_parsing", "float_type"), "must be a number"),
}
_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
_ITEM = re.compile(r"(?<=\w)\.\d+(?=: )")  # the ".3" of a list's item 3 in the error "field.3: ..."

# A dotted key with many parts, for which tomllib needs quadratic time.
_PART = r"""(?:[A-Za-z0-9_-]++|"[^"\n]*+"|'[^'\n]*+')"""
_DOTTED = re.compile(rf"(?<![A-Za-z0-9_-]){_PART}(?:[ \t]*+\.[ \t]*+{_PART}){{{_MOST_TOML_DEPTH}}}")


def read_json(data: Text, what: str) -> Any:
    """Parse JSON; NaN, infinity and huge numbers are errors."""
    try:
        found = from_json(bytes(data), allow_inf_nan=False)
    except ValueError as error:
        raise InvalidInput(what, f"is not JSON: {error}") from None
    check_numbers(found, what)
    return found


def read_toml(data: Text, what: str, *, largest: float = LARGEST_NUMBER) -> dict[str, Any]:
    """Parse TOML; InvalidInput for NaN, and for numbers above `largest` (infinity: no limit)."""
    try:
        text = bytes(data).decode("utf-8")
        if (match := _DOTTED.search(text)) is not None:
            raise InvalidInput(what, f"has a key with too many parts: {shown(match[0])}")
        found = tomllib.loads(text)
    except RecursionError:
        raise InvalidInput(what, "is not TOML: nested too deeply") from None
    except ValueError as error:
        raise InvalidInput(what, f"is not TOML: {error}") from None
    check_numbers(found, what, largest=largest, most_depth=_MOST_TOML_DEPTH)
    return found


def read_record(kind: TypeAdapter[_T], data: Text, what: str) -> _T:
    """Parse and validate a JSON record; InvalidInput names the first invalid field."""
    try:
        return kind.validate_json(bytes(data))
    except ValidationError as error:
        raise InvalidInput(what, first_fault(error)) from None


def read_finite_record(kind: TypeAdapter[_T], data: Text, what: str) -> _T:
    """Parse and validate a JSON record; InvalidInput also for infinite, NaN and huge numbers."""
    read_json(data, what)
    return read_record(kind, data, what)


def read_peer_record(kind: TypeAdapter[_T], data: Text, what: str) -> _T:
    """Parse and validate a JSON record from a peer; InvalidInput also for a very large record.

    pydantic keeps an error of 1,400 bytes for each unknown field, so limit the fields; lists in
    `kind` must use FailFast for the same reason.
    """
    # Check the size first, because `bytes` copies the data.
    if memoryview(data).nbytes > _MOST_PEER_NBYTES or bytes(data).count(b":") > _MOST_PEER_FIELDS:
        problem = f"must have at most {_MOST_PEER_NBYTES:,} bytes and {_MOST_PEER_FIELDS:,} fields"
        raise InvalidInput(what, problem)
    try:
        # Errors keep their input: refer to one parsed record instead of converting it for each.
        return kind.validate_python(from_json(bytes(data)))
    except ValidationError as error:
        raise InvalidInput(what, first_fault(error)) from None
    except ValueError as error:
        raise InvalidInput(what, f"is not JSON: {error}") from None


def validated(kind: type[_T], values: Any, prefix: str = "") -> _T:
    """Create an instance of `kind` from unvalidated values; InvalidInput names the first bad field.

    `prefix`: text before the field's name in the error.
    """
    try:
        return TypeAdapter(kind).validate_python(values)
    except ValidationError as error:
        fault = _ITEM.sub("", first_fault(error))
        raise InvalidInput.of(f"{prefix}{fault}") from None


def fault_of(error: ValidationError) -> ErrorDetails:
    """Return the first error; if a field is missing, an unknown field (a misspelling) instead."""
    first, *others = error.errors(include_url=False)
    if first["type"] != "missing":
        return first
    table = first["loc"][:-1]
    unknown = (one for one in others if one["type"] in _UNKNOWN and one["loc"][:-1] == table)
    return next(unknown, first)


def first_fault(error: ValidationError, name: str = "") -> str:
    """Describe the first error of a validation: the field, the requirement and the given value.

    `name`: name of the validated field, if only its value and not a whole record was validated.
    """
    fault = fault_of(error)
    field = ".".join(str(part) for part in (name, *fault["loc"]) if part != "")
    if (known := _PROBLEMS.get(fault["type"])) is not None:
        problem = known.format(**{key: _plain(one) for key, one in fault.get("ctx", {}).items()})
    else:
        problem = fault["msg"].removeprefix("Value error, ")
    is_told = fault["type"] in ("missing", "value_error", "json_invalid", *_UNKNOWN)
    given = "" if is_told else f" (got {_as_typed(fault['input'])})"
    return f"{field}: {problem}{given}" if field else problem


def _plain(bound: object) -> object:
    if isinstance(bound, str):  # pydantic writes enum members as <Kind.LOAD: 'load'>
        return re.sub(r"<[\w.]+: ('\w*')>", r"\1", bound)
    return int(bound) if isinstance(bound, float) and bound.is_integer() else bound


def _as_typed(value: object) -> str:
    """Format a value for a message; show text that is a number without quotes."""
    if isinstance(value, str) and value.isprintable():
        with suppress(ValueError):
            float(value)
            return value
    return shown(value)


def check_numbers(
    value: Any,
    what: str,
    *,
    largest: float = LARGEST_NUMBER,
    most_depth: int = MOST_DEPTH,
    path: tuple[str, ...] = (),
) -> None:
    """Raise InvalidInput for infinite, NaN or huge numbers, and for deep nesting, in `value`.

    `path`: keys that lead from the document `what` to `value`, for the error.
    """
    problem = ""
    if isinstance(value, dict | list):
        if len(path) == most_depth:
            raise InvalidInput(what, f"is nested deeper than {most_depth} levels")
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            inside = (*path, str(key))
            check_numbers(inner, what, largest=largest, most_depth=most_depth, path=inside)
    elif isinstance(value, float) and not abs(value) <= largest:
        limit = f"at most {largest:g}" if isfinite(value) else "finite"
        problem = f"must be {limit} (got {value})"
    elif isinstance(value, int) and abs(value) > LARGEST_INTEGER:
        problem = f"must fit into 64 bits (got {shown(value)})"
    if problem:
        raise InvalidInput(what, f"{'.'.join(path)} {problem}".strip())
