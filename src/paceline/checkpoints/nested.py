"""Split nested dicts and lists into plain values and named tensors, and join them again."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from paceline.checkpoints.json_values import Json
from paceline.checkpoints.tensor_file import Tensors

_Path = tuple[Any, ...]  # keys of dicts and indices of lists, outermost first


def apart(value: Json) -> tuple[Json, Tensors]:
    """Separate a value into plain values, and tensors by path, such as "KEY/KEY/INDEX"."""
    paths: list[_Path] = []
    tensors: Tensors = {}

    def without(one: Json, path: _Path) -> Json:
        if isinstance(one, Tensor):
            paths.append(path)
            tensors[_name(path)] = one
            return None
        if isinstance(one, dict):
            return {key: without(inner, (*path, key)) for key, inner in one.items()}
        if isinstance(one, list):
            return [without(inner, (*path, index)) for index, inner in enumerate(one)]
        return one

    return {"value": without(value, ()), "tensors": paths}, tensors


def together(values: Json, tensors: Mapping[str, Tensor]) -> Any:
    """Put tensors back into the values that `apart` returned.

    Raises LookupError or TypeError for any other values.
    """
    for path in values["tensors"]:
        inner = values["value"]
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = tensors[_name(path)]
    return values["value"]


def _name(path: _Path) -> str:
    return "/".join(map(str, path))
