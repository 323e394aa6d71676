"""Nested dicts and lists of plain values and tensors, taken apart into JSON and named tensors."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from paceline.checkpoints.json_values import Json
from paceline.checkpoints.tensor_file import Tensors

_Path = tuple[Any, ...]  # keys of dicts and places in lists, from the outside in


def apart(value: Json) -> tuple[Json, Tensors]:
    """Return a value without its tensors, and these by their places in it, as KEY/KEY/PLACE."""
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
            return [without(inner, (*path, place)) for place, inner in enumerate(one)]
        return one

    return {"value": without(value, ()), "tensors": paths}, tensors


def together(values: Json, tensors: Mapping[str, Tensor]) -> Any:
    """Return what `apart` was given; LookupError or TypeError if that has not made `values`."""
    for path in values["tensors"]:
        inner = values["value"]
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = tensors[_name(path)]
    return values["value"]


def _name(path: _Path) -> str:
    return "/".join(map(str, path))
