"""Workloads of common built-in models, read from a record without importing torch.

    python -m paceline.records.built_in      # regenerates the record with torch in half a minute

Each cost of a layer is a linear function a*b + c of the batch size b; `working_nbytes` is the
maximum of several linear functions. The functions are exact for two or more samples. For a single
sample, PyTorch sums the gradients of some layers differently, so "alone" records the costs of such
layers for one sample.
"""

import json
import re
from collections.abc import Callable
from functools import cache, partial
from importlib import resources
from operator import attrgetter
from pathlib import Path
from typing import Any

from paceline.core.workload import Cost, Layer, Parameter, Workload

_FILE = "built_in.json"
RECORDED = ("lenet5", "alexnet", "vgg16", "resnet18", "resnet50", "gpt", "gpt2")
_MOST = 2**20  # largest batch size at which the linear functions of sizes are checked
_MOST_COUNTED = 2**13  # largest checked batch size of costs; costs of larger batches are inexact
_SIZES = ("activation_nbytes", "kept_nbytes", "working_nbytes")
_COSTS = ("flops", "nbytes", "num_calls", "num_syncs")

_Growing = int | list[list[int]]  # a constant, or linear functions [a, c]
# A layer's costs. Each key in `_SIZES` has one `_Growing`. The keys "forward" and "backward" have a
# list of `_Growing`, in the order of `_COSTS`.
_Numbers = dict[str, Any]
_Describe = Callable[[int], Workload]


@cache
def _record() -> dict[str, Any]:
    file = resources.files(__package__).joinpath(_FILE)
    known: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return known


def recorded(name: str, batch_size: int) -> Workload | None:
    """Return a step of a built-in model; None if the record lacks the model or batch size."""
    found = _record()["models"].get(name)
    if found is None or not 1 <= batch_size <= _MOST:
        return None
    return step_of(found, name, batch_size)


def step_of(record: dict[str, Any], name: str, batch_size: int) -> Workload:
    """Return a recorded model's step with the given number of samples."""
    alone = record["alone"] if batch_size == 1 else {}
    layers = (_layer(one, alone.get(one["name"], one), batch_size) for one in record["layers"])
    return Workload(
        name=name,
        batch_size=batch_size,
        layers=tuple(layers),
        backward_order=tuple(record["backward_order"]),
        input_nbytes=record["sample_nbytes"] * batch_size,
    )


def _layer(one: dict[str, Any], numbers: _Numbers, batch_size: int) -> Layer:
    sizes = {name: _at(numbers[name], batch_size) for name in _SIZES}
    forward, backward = (
        Cost(float(values[0]), float(values[1]), *values[2:])
        for values in (
            [_at(n, batch_size) for n in numbers[way]] for way in ("forward", "backward")
        )
    )
    parameters = tuple(Parameter(name, tuple(shape)) for name, shape in one["parameters"])
    return Layer(
        one["name"], parameters, forward=forward, backward=backward, kind=one["kind"], **sizes
    )


def _at(number: _Growing, batch_size: int) -> int:
    if isinstance(number, int):
        return number
    return max(slope * batch_size + start for slope, start in number)


# The functions below make the record.


def record_of(describe: _Describe) -> dict[str, Any]:
    """Record a model; `describe(n)` returns its step with n samples.

    Raises ValueError if a cost is not linear.
    """
    known = cache(describe)
    some, alone = known(2), known(1)
    if _structure(some) != _structure(alone):
        raise ValueError(f"{some.name}: layers differ between one sample and two")
    layers = [_recorded_layer(known, number) for number in range(len(some.layers))]
    return {
        "sample_nbytes": alone.input_nbytes,
        "backward_order": some.backward_order,
        "layers": layers,
        "alone": {
            layer.name: _numbers_of(layer)
            for layer, one in zip(alone.layers, layers, strict=True)
            if _layer(one, one, 1) != layer
        },
    }


def _structure(step: Workload) -> object:
    return step.backward_order, [(one.name, one.kind, one.parameters) for one in step.layers]


def _numbers_of(layer: Layer) -> _Numbers:
    ways = {"forward": layer.forward, "backward": layer.backward}
    costs = {way: [int(getattr(cost, name)) for name in _COSTS] for way, cost in ways.items()}
    return {name: getattr(layer, name) for name in _SIZES} | costs


def _recorded_layer(known: _Describe, number: int) -> dict[str, Any]:
    def growing(of: Callable[[Layer], float], most: int) -> _Growing:
        lines = _lines(lambda size: int(of(known(size).layers[number])), 2, most)
        return lines[0][1] if [slope for slope, _ in lines] == [0] else lines

    def costs_of(way: str) -> list[_Growing]:
        return [growing(attrgetter(f"{way}.{name}"), _MOST_COUNTED) for name in _COSTS]

    layer = known(2).layers[number]
    return {
        "name": layer.name,
        "kind": layer.kind,
        "parameters": [[parameter.name, parameter.shape] for parameter in layer.parameters],
        **{name: growing(attrgetter(name), _MOST) for name in _SIZES},
        **{way: costs_of(way) for way in ("forward", "backward")},
    }


def _lines(value: Callable[[int], int], low: int, high: int) -> list[list[int]]:
    """Return linear functions whose maximum is `value` from `low` to `high`.

    Raises ValueError if `value` is not convex.
    """
    lines, waiting, looked_at = set[tuple[int, int]](), [(low, high)], set[int]()
    while waiting:
        start, stop = waiting.pop()
        first, last = _through(value, start), _through(value, stop - 1)
        lines |= {first, last}
        looked_at |= {start, stop}
        if first == last:
            continue
        # Two lines suffice here only if the value at their intersection is on both.
        meeting = (first[1] - last[1]) // (last[0] - first[0])
        around = [size for size in (meeting, meeting + 1) if start <= size <= stop]
        looked_at |= {*around}
        if any(value(size) != max(a * size + c for a, c in (first, last)) for size in around):
            waiting += [(start, meeting), (meeting + 1, stop)]
    for size in sorted(looked_at):
        if value(size) != max(a * size + c for a, c in lines):
            raise ValueError(f"the cost of {size} samples is not on any of the lines")
    return [[*line] for line in sorted(lines)]


def _through(value: Callable[[int], int], size: int) -> tuple[int, int]:
    slope = value(size + 1) - value(size)
    return slope, value(size) - slope * size


def _written(models: dict[str, Any], version: str) -> str:
    """Format the record as JSON with one line for each layer."""
    text = json.dumps({"torch": version, "models": models}, separators=(",", ":"))
    return re.sub(r'(?=\{"name":|"[\w.()-]+":\{)', "\n", text) + "\n"


def main() -> None:
    """Write the record of all models in `RECORDED`."""
    import torch

    from paceline.training.recipes.named import workload_of

    models = {name: record_of(partial(workload_of, name)) for name in RECORDED}
    text = _written(models, torch.__version__)
    Path(__file__).with_name(_FILE).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
