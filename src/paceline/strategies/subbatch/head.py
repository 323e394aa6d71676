"""Cut a model into a body, which every worker has whole, and a head that is split by outputs."""

from dataclasses import dataclass, replace

from paceline.core.cutting import refusal_of
from paceline.core.errors import InvalidInput
from paceline.core.workload import Layer, Parameter, Workload

_KINDS = ("Linear", "BatchNorm1d", "")  # of layers that can be split; what is not known may be one


@dataclass(frozen=True)
class Cut:
    """The body as a workload of its own, and the layers of the head in forward order."""

    body: Workload
    head: tuple[Layer, ...]

    @property
    def rows_per_sample(self) -> int:
        """The rows that a sample has in the head: one, or one for each of its tokens."""
        matrix = matrix_of(self.head[0])
        assert matrix is not None  # a head begins with a linear layer
        row_nbytes = matrix.shape[1] * matrix.element_size
        handed_on = self.body.layers[-1].activation_nbytes / self.body.batch_size
        return max(1, round(handed_on / row_nbytes))


def cut(workload: Workload, first: str | None, workers: int) -> Cut:
    """Return the body and the head that begins with the layer `first`.

    By default the head is the longest run of layers at the end that can be split; the first layer
    of a model always belongs to the body. Cuts that were tried and refused are left out. Raises
    InvalidInput if a layer cannot be split.
    """
    start = _found(workload) if first is None else _named(workload, first)
    for layer in workload.layers[start:]:
        if num_outputs(layer) < workers:
            raise InvalidInput(
                "workers",
                f"layer {layer.name!r} of {workload.name} has {num_outputs(layer)} outputs, which "
                f"cannot be split among {workers}",
                hint="use fewer workers, or a head that begins after it",
            )
    order = tuple(i for i in workload.backward_order if i < start)
    body = replace(workload, layers=workload.layers[:start], backward_order=order)
    return Cut(body, workload.layers[start:])


def matrix_of(layer: Layer) -> Parameter | None:
    """Return a linear layer's weights, of outputs x inputs; None for a normalising layer."""
    return next((one for one in layer.parameters if len(one.shape) == 2), None)


def num_outputs(layer: Layer) -> int:
    """Return the number of outputs of a layer for each sample."""
    return (matrix_of(layer) or layer.parameters[0]).shape[0]


def shares(count: int, workers: int) -> list[int]:
    """Split `count` into parts as equal as possible, the larger ones first, without empty ones."""
    whole, rest = divmod(count, workers)
    return [part for i in range(workers) if (part := whole + (i < rest))]


def _named(workload: Workload, first: str) -> int:
    names = [layer.name for layer in workload.layers]
    if first not in names:
        raise InvalidInput(
            "head",
            f"{workload.name} has no layer {first!r}",
            hint=f"choose one of {', '.join(names)}",
        )
    start = names.index(first)
    if not start:
        raise InvalidInput(
            "head",
            f"{first!r} is the first layer of {workload.name}",
            hint="the head begins after it, for what it works on has to be computed by a body",
        )
    if why := refusal_of(workload, first):
        raise InvalidInput.of(why)
    problem = _problem(workload, start)
    if problem is None and matrix_of(workload.layers[start]) is None:
        problem = f"layer {first!r} is not linear, and cannot be the first of a head"
    if problem is None and not _comes_first(workload, start):
        problem = f"the gradients of layer {first!r}, and of those after it, are not the first"
    if problem is not None:
        raise InvalidInput("head", f"{workload.name} cannot be split there: {problem}")
    return start


def _found(workload: Workload) -> int:
    layers, found = workload.layers, None
    for start in range(len(layers) - 1, 0, -1):
        if _problem(workload, start) is not None or not _comes_first(workload, start):
            break
        if (
            matrix_of(layers[start]) is not None
            and refusal_of(workload, layers[start].name) is None
        ):
            found = start
    if found is None and workload.refused_cuts:
        raise InvalidInput.of(workload.refused_cuts[0][1])
    if found is None:
        last = layers[-1]
        reason = _problem(workload, len(layers) - 1)
        reason = reason or f"layer {last.name!r} is not linear, or the only one"
        raise InvalidInput(
            "strategy subbatch",
            f"{workload.name} has no head to split: {reason}",
            hint=(
                "it needs one or more linear layers at its end, with weights of their own (an "
                "output layer that is tied to the embedding has none: untie it)"
            ),
        )
    return found


def _comes_first(workload: Workload, start: int) -> bool:
    """Return True if backward begins with the layers from `start` on, the last one first."""
    count = len(workload.layers)
    return workload.backward_order[: count - start] == tuple(range(count - 1, start - 1, -1))


def _problem(workload: Workload, start: int) -> str | None:
    """Return why layers from `start` on cannot be split one after the other by outputs, or None."""
    before: Layer | None = None
    for layer in workload.layers[start:]:
        shapes = [parameter.shape for parameter in layer.parameters]
        matrices = [shape for shape in shapes if len(shape) == 2]
        widths = {shape[0] for shape in shapes if shape}
        dims = set(map(len, shapes))
        if not shapes or len(matrices) > 1 or len(widths) > 1 or not dims <= {1, 2}:
            shown = ", ".join("x".join(map(str, shape)) for shape in shapes) or "none of its own"
            return f"layer {layer.name!r} has parameters of shape {shown}"
        if layer.kind not in _KINDS:
            return f"layer {layer.name!r} is {layer.kind}"
        if layer.kind == "Linear" and not matrices:
            return f"layer {layer.name!r} has the weight of another layer"
        inputs = matrices[0][1] if matrices else shapes[0][0]
        if before is not None and inputs != num_outputs(before):
            return (
                f"layer {layer.name!r} takes {inputs} inputs, "
                f"but {before.name!r} has {num_outputs(before)} outputs"
            )
        rows = _rows_of(layer, workload.batch_size)
        if not matrices and rows > 1:
            return f"layer {layer.name!r} normalises each of {rows} rows of a sample"
        if before is not None and rows != _rows_of(before, workload.batch_size):
            return f"layer {layer.name!r} has {rows} rows of a sample, but {before.name!r} others"
        before = layer
    return None


def _rows_of(layer: Layer, batch_size: int) -> int:
    """Return how often a sample goes through a layer: once, or once for each of its tokens."""
    row_nbytes = num_outputs(layer) * layer.parameters[0].element_size
    return max(1, round(layer.activation_nbytes / batch_size / row_nbytes))
