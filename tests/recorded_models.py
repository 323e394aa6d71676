"""Make the record of built-in models (paceline/records/built_in.json) with torch.

It takes half a minute: python tests/recorded_models.py
"""

import json
import re
from collections.abc import Callable
from functools import cache, partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from paceline.core.workload import Layer, Workload
from paceline.records import built_in
from paceline.records.built_in import FILE, MOST_SAMPLES, SIZES, Growing, Numbers, layer_of
from paceline.training.recipes.named import workload_of

RECORDED = ("lenet5", "alexnet", "vgg16", "resnet18", "resnet50", "gpt", "gpt2")
_MOST_COUNTED = 2**13  # largest checked batch size of costs; costs of larger batches are inexact
_COSTS = ("flops", "nbytes", "num_calls", "num_syncs")
_Describe = Callable[[int], Workload]


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
            if layer_of(one, one, 1) != layer
        },
    }


def _structure(step: Workload) -> object:
    return step.backward_order, [(one.name, one.kind, one.parameters) for one in step.layers]


def _numbers_of(layer: Layer) -> Numbers:
    ways = {"forward": layer.forward, "backward": layer.backward}
    costs = {way: [int(getattr(cost, name)) for name in _COSTS] for way, cost in ways.items()}
    return {name: getattr(layer, name) for name in SIZES} | costs


def _recorded_layer(known: _Describe, number: int) -> dict[str, Any]:
    def growing(of: Callable[[Layer], float], most: int) -> Growing:
        lines = _lines(lambda size: int(of(known(size).layers[number])), 2, most)
        return lines[0][1] if [slope for slope, _ in lines] == [0] else lines

    def costs_of(way: str) -> list[Growing]:
        return [growing(attrgetter(f"{way}.{name}"), _MOST_COUNTED) for name in _COSTS]

    layer = known(2).layers[number]
    return {
        "name": layer.name,
        "kind": layer.kind,
        "parameters": [[parameter.name, parameter.shape] for parameter in layer.parameters],
        **{name: growing(attrgetter(name), MOST_SAMPLES) for name in SIZES},
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
    models = {name: record_of(partial(workload_of, name)) for name in RECORDED}
    text = _written(models, torch.__version__)
    Path(built_in.__file__).with_name(FILE).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
