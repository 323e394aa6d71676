"""Workloads of built-in models, read from built_in.json without importing torch.

Each cost of a layer is a linear function a*b + c of the batch size b; `working_nbytes` is the
maximum of several linear functions. The functions are exact for two or more samples. For a single
sample, PyTorch sums the gradients of some layers differently, so a model's entry "alone"
records the costs of such layers for one sample.
"""

import json
from functools import cache
from importlib import resources
from typing import Any

from paceline.core.workload import Cost, Layer, Parameter, Workload

FILE = "built_in.json"  # written by tests/recorded_models.py
MOST_SAMPLES = 2**20  # largest batch size for which tests check the recorded sizes
SIZES = ("activation_nbytes", "kept_nbytes", "working_nbytes")

Growing = int | list[list[int]]  # a constant, or the maximum of linear functions [a, c]
# A layer's costs. Each key in `SIZES` has a `Growing`. The keys "forward" and "backward" have a
# list with one `Growing` for each field of `Cost`, in the order of the fields.
Numbers = dict[str, Any]


@cache
def _record() -> dict[str, Any]:
    file = resources.files(__package__).joinpath(FILE)
    known: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return known


def recorded(name: str, batch_size: int) -> Workload | None:
    """Return the workload of a model's step; None for an unknown model or batch size."""
    found = _record()["models"].get(name)
    if found is None or not 1 <= batch_size <= MOST_SAMPLES:
        return None
    return step_of(found, name, batch_size)


def step_of(record: dict[str, Any], name: str, batch_size: int) -> Workload:
    """Return the workload of a step from a model's `record`, its entry in built_in.json."""
    alone = record["alone"] if batch_size == 1 else {}
    layers = (layer_of(one, alone.get(one["name"], one), batch_size) for one in record["layers"])
    return Workload(
        name=name,
        batch_size=batch_size,
        layers=tuple(layers),
        backward_order=tuple(record["backward_order"]),
        input_nbytes=record["sample_nbytes"] * batch_size,
    )


def layer_of(one: dict[str, Any], numbers: Numbers, batch_size: int) -> Layer:
    """Build a layer from its record `one`; `numbers`: costs as functions of the batch size."""

    def cost(way: str) -> Cost:
        flops, nbytes, *counts = (_at(number, batch_size) for number in numbers[way])
        return Cost(float(flops), float(nbytes), *counts)

    return Layer(
        name=one["name"],
        parameters=tuple(Parameter(name, tuple(shape)) for name, shape in one["parameters"]),
        forward=cost("forward"),
        backward=cost("backward"),
        kind=one["kind"],
        **{name: _at(numbers[name], batch_size) for name in SIZES},
    )


def _at(number: Growing, batch_size: int) -> int:
    if isinstance(number, int):
        return number
    return max(slope * batch_size + start for slope, start in number)
