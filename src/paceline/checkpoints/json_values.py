"""Python's plain values as JSON that gives back exactly these values.

JSON has no infinite numbers, no tuples, and only strings as keys. An object with the key "$" stands
for what it lacks; all else is itself, so that a person can read the file:

    inf             {"$": "float", "value": "inf"}
    (1, 2)          {"$": "tuple", "items": [1, 2]}
    {1: "a"}        {"$": "dict", "items": [[1, "a"]]}
    Counter("a")    {"$": "Counter", "items": [["a", 1]]}
"""

import json
from collections import Counter
from collections.abc import Callable
from math import isfinite
from typing import Any

from pydantic_core import from_json

from paceline.core.errors import InvalidInput

Json = Any  # None, bool, int, float, str, and lists, tuples, dicts and Counters of such values
_TAG = "$"


def dumps(what: str, value: Json) -> bytes:
    """Return a value as JSON; InvalidInput names what of `what` it cannot hold."""
    return json.dumps(_encoded(what, value), indent=1, allow_nan=False).encode() + b"\n"


def loads(text: bytes) -> Json:
    """Return the value of a text that `dumps` has made; ValueError if it has made no such text."""
    try:
        # Integers of any size, as random states have them, and no other depth than pydantic's.
        return _decoded_in(from_json(text, allow_inf_nan=False))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"not the JSON of a checkpoint: {error}") from None


def copied(what: str, value: Json) -> Json:
    """Return a copy that shares nothing with the value; InvalidInput as of `dumps`."""
    try:
        return loads(dumps(what, value))
    except ValueError as error:
        raise InvalidInput(what, f"cannot be saved as JSON: {error}") from None


def _encoded(where: str, value: Json) -> Json:
    # Of these types exactly: a subclass, such as an enum, would come back as its base.
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float):  # and numpy.float64, which is one
        return float(value) if isfinite(value) else {_TAG: "float", "value": repr(float(value))}
    if type(value) in (list, tuple):
        items = [_encoded(f"{where}[{index}]", one) for index, one in enumerate(value)]
        return items if type(value) is list else {_TAG: "tuple", "items": items}
    if type(value) in (dict, Counter):
        return _encoded_mapping(where, value)
    kind = type(value)
    raise InvalidInput(
        where, f"is {kind.__module__}.{kind.__qualname__}, which cannot be saved as JSON"
    )


def _encoded_mapping(where: str, value: dict[Any, Json]) -> Json:
    if type(value) is dict and _TAG not in value and all(type(key) is str for key in value):
        return {key: _encoded(f"{where}.{key}", one) for key, one in value.items()}
    items = [
        [_encoded(f"{where}, key {key!r}", key), _encoded(f"{where}[{key!r}]", one)]
        for key, one in value.items()
    ]
    return {_TAG: type(value).__name__, "items": items}


def _of_items(make: Callable[[Any], Any]) -> Callable[[dict[str, Any]], Any]:
    return lambda fields: make(fields["items"])


_DECODED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "float": lambda fields: float(fields["value"]),
    "tuple": _of_items(tuple),
    "dict": _of_items(dict),
    "Counter": _of_items(lambda items: Counter(dict(items))),
}


def _decoded_in(value: Any) -> Json:
    """Return the value that JSON stands for, from the inside out; it is at most 200 deep."""
    if isinstance(value, list):
        return [_decoded_in(one) for one in value]
    if isinstance(value, float) and not isfinite(value):  # 1e400
        raise ValueError(f"{value} is no JSON")
    if not isinstance(value, dict):
        return value
    fields = {key: _decoded_in(one) for key, one in value.items()}
    return _DECODED[fields[_TAG]](fields) if _TAG in fields else fields
