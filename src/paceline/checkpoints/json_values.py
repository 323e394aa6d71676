"""Encode plain Python values as JSON, and decode exactly the same values.

`apart` separates tensors from plain values, and `together` joins them.

A value that JSON cannot represent becomes an object with the key "$". All other values become plain
JSON.

    inf             {"$": "float", "value": "inf"}
    (1, 2)          {"$": "tuple", "items": [1, 2]}
    {1: "a"}        {"$": "dict", "items": [[1, "a"]]}
    Counter("a")    {"$": "Counter", "items": [["a", 1]]}
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any

from pydantic_core import from_json
from torch import Tensor

from paceline.checkpoints.tensor_file import Tensors
from paceline.core.errors import InvalidInput

Json = Any  # None, bool, int, float, str, and lists, tuples, dicts and Counters of such values
_TAG = "$"
_Path = tuple[Any, ...]  # keys of dicts and indices of lists, outermost first


def dumps(what: str, value: Json) -> bytes:
    """Encode a value as JSON.

    Raises InvalidInput for an unsupported value; the error says where it is: WHAT.KEY[INDEX].
    """
    return json.dumps(_encoded(what, value), indent=1, allow_nan=False).encode() + b"\n"


def loads(text: bytes) -> Json:
    """Decode the JSON text that `dumps` returned; raises ValueError for any other text."""
    try:
        # Use pydantic's parser, which limits the nesting depth, and reads the large integers of
        # random states.
        return _decoded(from_json(text, allow_inf_nan=False))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"not a JSON text of a checkpoint: {error}") from None


def copied(what: str, value: Json) -> Json:
    """Return a deep copy of a value; raise InvalidInput if `dumps` does not support the value."""
    try:
        return loads(dumps(what, value))
    except ValueError as error:
        raise InvalidInput(what, f"cannot be saved: {error}") from None


def _encoded(where: str, value: Json) -> Json:
    # Accept exact types only: an instance of a subclass, such as an enum, would be decoded as an
    # instance of its base class.
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float):  # includes numpy.float64
        return float(value) if isfinite(value) else {_TAG: "float", "value": repr(float(value))}
    if type(value) in (list, tuple):
        items = [_encoded(f"{where}[{index}]", one) for index, one in enumerate(value)]
        return items if type(value) is list else {_TAG: "tuple", "items": items}
    kind = type(value)
    if kind not in (dict, Counter):
        problem = f"has type {kind.__module__}.{kind.__qualname__}, which JSON cannot hold"
        raise InvalidInput(where, problem)
    if kind is dict and _TAG not in value and all(type(key) is str for key in value):
        return {key: _encoded(f"{where}.{key}", one) for key, one in value.items()}
    items = [
        [_encoded(f"{where}, key {key!r}", key), _encoded(f"{where}[{key!r}]", one)]
        for key, one in value.items()
    ]
    return {_TAG: kind.__name__, "items": items}


_DECODERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "float": lambda fields: float(fields["value"]),
    "tuple": lambda fields: tuple(fields["items"]),
    "dict": lambda fields: dict(fields["items"]),
    "Counter": lambda fields: Counter(dict(fields["items"])),
}


def _decoded(value: Any) -> Json:
    """Replace each object that has the key "$" by the value that it encodes.

    The recursion is limited: pydantic's parser accepts at most 200 nested lists and objects.
    """
    if isinstance(value, list):
        return [_decoded(one) for one in value]
    if isinstance(value, float) and not isfinite(value):  # parsed from a number such as 1e400
        raise ValueError(f"a number is too large for a float: {value}")
    if not isinstance(value, dict):
        return value
    fields = {key: _decoded(one) for key, one in value.items()}
    return _DECODERS[fields[_TAG]](fields) if _TAG in fields else fields


def apart(value: Json) -> tuple[Json, Tensors]:
    """Return a nested value without its tensors, and its tensors by path: "KEY/KEY/INDEX"."""
    paths: list[_Path] = []
    tensors: Tensors = {}

    def without(one: Json, path: _Path) -> Json:
        if isinstance(one, Tensor):
            paths.append(path)
            tensors["/".join(map(str, path))] = one
            return None
        if isinstance(one, dict):
            return {key: without(inner, (*path, key)) for key, inner in one.items()}
        if isinstance(one, list):
            return [without(inner, (*path, index)) for index, inner in enumerate(one)]
        return one

    return {"value": without(value, ()), "tensors": paths}, tensors


def together(values: Json, tensors: Mapping[str, Tensor]) -> Any:
    """Join the plain values and tensors that `apart` returned, and return the nested value.

    Raises LookupError or TypeError if `values` or `tensors` are not results of `apart`.
    """
    for path in values["tensors"]:
        inner = values["value"]
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = tensors["/".join(map(str, path))]
    return values["value"]
