"""Where a model is cut: a body that every worker has whole, and a head that is split by outputs."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import dropwhile

from paceline.core.errors import InvalidInput
from paceline.core.workload import Layer, Parameter, Workload


@dataclass(frozen=True)
class Cut:
    """The body as a workload of its own, and the layers of the head in forward order."""

    body: Workload
    head: tuple[Layer, ...]


def cut(workload: Workload, first: str | None, workers: int) -> Cut:
    """Return the body and the head that begins with the layer `first`.

    By default the head is the longest run of layers at the end that can be split; the first layer
    of a model always belongs to the body. InvalidInput names the layer that stops it.
    """
    start = _found(workload) if first is None else _named(workload, first)
    head = workload.layers[start:]
    for layer in head:
        if num_outputs(layer) < workers:
            raise InvalidInput(
                f"workers: layer {layer.name!r} of {workload.name} has {num_outputs(layer)} "
                f"outputs, which cannot be split among {workers}; use fewer workers, or a head "
                "that begins after it"
            )
    order = tuple(i for i in workload.backward_order if i < start)
    body = workload.layers[:start]
    return Cut(
        Workload(workload.name, workload.batch_size, body, order, workload.input_nbytes), head
    )


def matrix_of(layer: Layer) -> Parameter | None:
    """Return a linear layer's weights, of outputs x inputs, or None for one that normalises."""
    return next((one for one in layer.parameters if len(one.shape) == 2), None)


def num_outputs(layer: Layer) -> int:
    """Return how many outputs there are to split for each sample."""
    return (matrix_of(layer) or layer.parameters[0]).shape[0]


def shares(count: int, workers: int) -> list[int]:
    """Return `count` in as equal parts as possible, the larger ones first, without empty ones."""
    whole, rest = divmod(count, workers)
    return [part for i in range(workers) if (part := whole + (i < rest))]


def _named(workload: Workload, first: str) -> int:
    names = [layer.name for layer in workload.layers]
    if first not in names:
        raise InvalidInput(
            f"head: {workload.name} has no layer {first!r}; choose one of {', '.join(names)}"
        )
    start = names.index(first)
    if not start:
        raise InvalidInput(
            f"head: {first!r} is the first layer of {workload.name}; "
            "the head begins after it, for what it works on has to be computed by a body"
        )
    problem = _problem(workload.layers[start:])
    if problem is None and matrix_of(workload.layers[start]) is None:
        problem = f"layer {first!r} is not linear, and cannot be the first of a head"
    if problem is None and not _last_forward_first_backward(workload, start):
        problem = f"the gradients of layer {first!r}, and of those after it, are not the first"
    if problem is not None:
        raise InvalidInput(f"head: {workload.name} cannot be split there: {problem}")
    return start


def _found(workload: Workload) -> int:
    layers = workload.layers
    start = len(layers)
    while (
        start > 1
        and _problem(layers[start - 1 :]) is None
        and _last_forward_first_backward(workload, start - 1)
    ):
        start -= 1
    linear = dropwhile(lambda i: matrix_of(layers[i]) is None, range(start, len(layers)))
    found = next(linear, None)
    if found is None:
        last = layers[-1]
        reason = _problem([last]) or f"layer {last.name!r} is not linear, or the only one"
        raise InvalidInput(
            f"strategy subbatch: {workload.name} has no head to split: {reason}; "
            "it needs one or more linear layers at its end"
        )
    return found


def _last_forward_first_backward(workload: Workload, start: int) -> bool:
    count = len(workload.layers)
    return workload.backward_order[: count - start] == tuple(range(count - 1, start - 1, -1))


def _problem(head: Sequence[Layer]) -> str | None:
    """Return why these layers cannot be split by outputs one after the other, or None."""
    before: Layer | None = None
    for layer in head:
        shapes = [parameter.shape for parameter in layer.parameters]
        matrices = [shape for shape in shapes if len(shape) == 2]
        widths = {shape[0] for shape in shapes if shape}
        if (
            not shapes
            or len(matrices) > 1
            or len(widths) > 1
            or not set(map(len, shapes)) <= {1, 2}
        ):
            shown = ", ".join("x".join(map(str, shape)) for shape in shapes) or "none of its own"
            return f"layer {layer.name!r} has parameters of shape {shown}"
        inputs = matrices[0][1] if matrices else shapes[0][0]
        if before is not None and inputs != num_outputs(before):
            return (
                f"layer {layer.name!r} takes {inputs} inputs, "
                f"but {before.name!r} has {num_outputs(before)} outputs"
            )
        before = layer
    return None
