"""Workloads of common built-in models, read from a record without importing torch.

    python -m paceline.records.built_in      # regenerates the record with torch in half a minute

Each cost of a layer is a linear function a b + c of the batch size b, except `working_nbytes`,
which is the maximum of several linear functions. This is exact from two samples on; for a single
sample PyTorch sums some gradients differently, so those layers are recorded twice.
"""

import json
from collections.abc import Callable
from functools import cache, partial
from importlib import resources
from pathlib import Path
from typing import Any

from paceline.core.workload import Cost, Layer, Parameter, Workload

_FILE = "built_in.json"
RECORDED = ("lenet5", "alexnet", "vgg16", "resnet18", "resnet50", "gpt", "gpt2")
_MOST = 2**20  # largest batch size that was compared with a description
_MOST_COUNTED = 2**13  # larger floats are not exact integers
_SIZES = ("activation_nbytes", "kept_nbytes", "working_nbytes")
_COSTS = ("flops", "nbytes", "num_calls", "num_syncs")

# A cost: a constant, or its lines [a, c].
_Growing = int | list[list[int]]
_Numbers = dict[str, Any]  # `_SIZES`, each growing; "forward" and "backward", each `_COSTS`
_Describe = Callable[[int], Workload]


@cache
def _record() -> dict[str, Any]:
    file = resources.files(__package__).joinpath(_FILE)
    known: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return known


def recorded(name: str, batch_size: int) -> Workload | None:
    """Return a step of a built-in model; None if the record lacks it."""
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
        one["name"],
        parameters,
        forward=forward,
        backward=backward,
        kind=one["kind"],
        **sizes,
    )


def _at(number: _Growing, batch_size: int) -> int:
    if isinstance(number, int):
        return number
    return max(slope * batch_size + start for slope, start in number)


# Making the record.


def record_of(describe: _Describe) -> dict[str, Any]:
    """Make the record of a model; `describe(n)` returns its step with n samples.

    Raises ValueError if a cost is not linear.
    """
    known = cache(describe)
    some, alone = known(2), known(1)
    if [some.backward_order, *map(_shape, some.layers)] != [
        alone.backward_order,
        *map(_shape, alone.layers),
    ]:
        raise ValueError(f"{some.name}: a single sample has other layers than two")
    layers = [_recorded_layer(known, number) for number in range(len(some.layers))]
    pairs = [(layer.name, layer, _numbers_of(layer)) for layer in alone.layers]
    return {
        "sample_nbytes": alone.input_nbytes,
        "backward_order": some.backward_order,
        "layers": layers,
        "alone": {
            name: numbers
            for (name, layer, numbers), one in zip(pairs, layers, strict=True)
            if _layer(one, one, 1) != layer
        },
    }


def _shape(layer: Layer) -> tuple[object, ...]:
    return layer.name, layer.kind, layer.parameters


def _numbers_of(layer: Layer) -> _Numbers:
    ways = {"forward": layer.forward, "backward": layer.backward}
    costs = {way: [int(getattr(cost, name)) for name in _COSTS] for way, cost in ways.items()}
    return {name: getattr(layer, name) for name in _SIZES} | costs


def _recorded_layer(known: _Describe, number: int) -> dict[str, Any]:
    def growing(of: Callable[[_Numbers], int], most: int) -> _Growing:
        lines = _lines(lambda size: of(_numbers_of(known(size).layers[number])), 2, most)
        return lines[0][1] if [slope for slope, _ in lines] == [0] else lines

    def size_of(name: str) -> _Growing:
        return growing(lambda numbers: int(numbers[name]), _MOST)

    def cost_of(way: str, index: int) -> _Growing:
        return growing(lambda numbers: int(numbers[way][index]), _MOST_COUNTED)

    layer = known(2).layers[number]
    ways = ("forward", "backward")
    return {
        "name": layer.name,
        "kind": layer.kind,
        "parameters": [[parameter.name, parameter.shape] for parameter in layer.parameters],
        **{name: size_of(name) for name in _SIZES},
        **{way: [cost_of(way, index) for index in range(len(_COSTS))] for way in ways},
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
        # At the intersection the value lies on both lines, or further lines are needed in between.
        meeting = (first[1] - last[1]) // (last[0] - first[0])
        around = [size for size in (meeting, meeting + 1) if start <= size <= stop]
        looked_at |= {*around}
        if any(value(size) != max(a * size + c for a, c in (first, last)) for size in around):
            waiting += [(start, meeting), (meeting + 1, stop)]
    for size in sorted(looked_at):
        if value(size) != max(a * size + c for a, c in lines):
            raise ValueError(f"what is needed of {size} samples is not the largest of some lines")
    return [[*line] for line in sorted(lines)]


def _through(value: Callable[[int], int], size: int) -> tuple[int, int]:
    slope = value(size + 1) - value(size)
    return slope, value(size) - slope * size


def _written(models: dict[str, Any], version: str) -> str:
    """Format the record as JSON with one line for each layer."""

    def block(opening: str, lines: list[str], closing: str) -> str:
        return "\n".join([opening, ",\n".join(lines), closing]) if lines else opening + closing

    def shown(value: object) -> str:
        return json.dumps(value, separators=(",", ":"))

    blocks = []
    for name, one in models.items():
        alone = [f"{shown(layer)}:{shown(numbers)}" for layer, numbers in one["alone"].items()]
        head = f'"sample_nbytes":{one["sample_nbytes"]},\n'
        head += f'"backward_order":{shown(one["backward_order"])},\n'
        layers = block('"layers":[', [shown(layer) for layer in one["layers"]], "]")
        of_one = block('"alone":{', alone, "}")
        blocks.append(f'"{name}":{{\n{head}{layers},\n{of_one}}}')
    return block(f'{{"torch":"{version}","models":{{', blocks, "}}") + "\n"


def main() -> None:
    """Write the record of all models in `RECORDED`."""
    import torch

    from paceline.training.recipes.named import workload_of

    models = {name: record_of(partial(workload_of, name)) for name in RECORDED}
    Path(__file__).with_name(_FILE).write_text(
        _written(models, torch.__version__), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
