"""Cut a model into body (first layers) and split head (last layers); compute head costs."""

from typing import NamedTuple, Self

from paceline.core.cost import update_cost
from paceline.core.cutting import Split, index_of, refusal_of
from paceline.core.errors import InvalidInput
from paceline.core.workload import Cost, Layer, Parameter, Workload

_KINDS = ("Linear", "BatchNorm1d", "")  # types of layers that may be split; "": unknown type


def cut(workload: Workload, first: str | None, workers: int) -> Split:
    """Cut a model into its body, and a head that begins with the layer `first`.

    If `first` is None, the head is as long as possible. A head cannot begin with the model's first
    layer, nor with a layer in `workload.refused_cuts`. Raises InvalidInput if there is no such
    head, if a layer of it cannot be split, or if it has fewer outputs than there are workers.
    """
    start = _found(workload) if first is None else index_of(workload, first)
    if problem := _fault(workload, start):
        raise InvalidInput("head", f"cannot be split: {problem}", got=first)
    for layer in workload.layers[start:]:
        if num_outputs(layer) < workers:
            raise InvalidInput(
                "workers",
                f"must be at most the {num_outputs(layer)} outputs of layer {layer.name!r}",
                got=workers,
                hint="use fewer workers, or a head that begins after this layer",
            )
    return Split.before(workload, start)


def rows_per_sample(parts: Split) -> int:
    """Return the number of rows per sample in the head: 1, or the number of tokens per sample."""
    matrix = matrix_of(parts.head.layers[0])
    assert matrix is not None  # a head begins with a linear layer
    row_nbytes = matrix.shape[1] * matrix.element_size
    return max(1, round(parts.head.input_nbytes / parts.head.batch_size / row_nbytes))


def matrix_of(layer: Layer) -> Parameter | None:
    """Return a linear layer's weight, of shape (outputs, inputs); None for BatchNorm1d."""
    return next((one for one in layer.parameters if len(one.shape) == 2), None)


def num_outputs(layer: Layer) -> int:
    """Return a layer's number of outputs per row."""
    return (matrix_of(layer) or layer.parameters[0]).shape[0]


def _found(workload: Workload) -> int:
    layers = workload.layers
    for start in range(1, len(layers)):
        if _fault(workload, start) is None and refusal_of(workload, layers[start].name) is None:
            return start
    if workload.refused_cuts:
        raise InvalidInput.of(workload.refused_cuts[0][1])
    reason = _fault(workload, len(layers) - 1) or f"{layers[-1].name!r} is the only layer"
    raise InvalidInput(
        "head", f"requires untied linear layers at the end of {workload.name}: {reason}"
    )


def _fault(workload: Workload, start: int) -> str | None:
    """Return why a split head cannot begin with the layer of index `start`; None if it can."""
    first = workload.layers[start]
    problem = _problem(workload, start)
    if problem is None and matrix_of(first) is None:
        return f"layer {first.name!r} is not linear"
    if problem is None and not _comes_first(workload, start):
        return f"backward must run {first.name!r} and the layers after it before all others"
    return problem


def _comes_first(workload: Workload, start: int) -> bool:
    """Return whether backward runs all layers from index `start` on before any earlier layer."""
    count = len(workload.layers)
    return workload.backward_order[: count - start] == tuple(range(count - 1, start - 1, -1))


def _problem(workload: Workload, start: int) -> str | None:
    """Return why the layers from index `start` on cannot be split by outputs; None if they can."""
    before: Layer | None = None
    for layer in workload.layers[start:]:
        shapes = [parameter.shape for parameter in layer.parameters]
        matrices = [shape for shape in shapes if len(shape) == 2]
        widths = {shape[0] for shape in shapes if shape}
        dims = set(map(len, shapes))
        if not shapes or len(matrices) > 1 or len(widths) > 1 or not dims <= {1, 2}:
            shown = ", ".join("x".join(map(str, shape)) for shape in shapes) or "none"
            return f"layer {layer.name!r} has parameters of shapes {shown}"
        if layer.kind not in _KINDS:
            return f"layer {layer.name!r} is {layer.kind}, neither Linear nor BatchNorm1d"
        if layer.kind == "Linear" and not matrices:
            return f"layer {layer.name!r} shares the weight of another layer"
        inputs = matrices[0][1] if matrices else shapes[0][0]
        if before is not None and inputs != num_outputs(before):
            return (
                f"layer {layer.name!r} has {inputs} inputs, but {before.name!r} before it has "
                f"{num_outputs(before)} outputs"
            )
        rows = _rows_of(layer, workload.batch_size)
        if not matrices and rows > 1:
            return f"layer {layer.name!r} normalises {rows} rows per sample, and must have only one"
        if before is not None and rows != _rows_of(before, workload.batch_size):
            return f"layers {before.name!r} and {layer.name!r} differ in rows per sample"
        before = layer
    return None


def _rows_of(layer: Layer, batch_size: int) -> int:
    """Return a layer's rows per sample: 1, or the number of tokens per sample."""
    row_nbytes = num_outputs(layer) * layer.parameters[0].element_size
    return max(1, round(layer.activation_nbytes / batch_size / row_nbytes))


class LayerWork(NamedTuple):
    """The costs of computing some outputs of a layer, forward and backward.

    For a linear layer, `backward_input` is the cost of its input gradients, and `backward_weight`
    that of its weight gradients. For other layers, `backward_input` is the cost of both, and
    `backward_weight` is None.
    """

    forward: Cost
    backward_input: Cost
    backward_weight: Cost | None

    def with_update(self, update: Cost) -> Self:
        """Add the cost of the weight update to that of computing the weight gradients."""
        if self.backward_weight is None:
            return self._replace(backward_input=self.backward_input + update)
        return self._replace(backward_weight=self.backward_weight + update)


def layer_work(layer: Layer, share: float, part: float, accumulates: bool) -> LayerWork:
    """Return a layer's costs for the fraction `share` of its outputs and `part` of the samples.

    The memory traffic of weights and weight gradients does not depend on `part`. `accumulates`:
    whether backward adds weight gradients to existing gradients, which it then also reads.
    """
    weights = layer.gradient_nbytes * share
    forward = _of(layer.forward, share, part, weights)
    if matrix_of(layer) is None:
        return LayerWork(forward, _of(layer.backward, share, part, 2 * weights), None)
    num_calls = layer.backward.num_calls
    half = _of(layer.backward, share, part, 2 * weights)
    flops, nbytes = half.flops / 2, half.nbytes / 2
    added = 2 * weights if accumulates and layer.backward.nbytes else 0.0
    return LayerWork(
        forward,
        Cost(flops, nbytes, num_calls - num_calls // 2),
        Cost(flops, nbytes + added, num_calls // 2),
    )


def update_work(layer: Layer, share: float) -> Cost:
    """Return the cost of updating the weights of the fraction `share` of a layer's outputs."""
    whole = update_cost(Workload(layer.name, 1, (layer,), (0,), 0))
    return Cost(whole.flops * share, whole.nbytes * share, whole.num_calls)


def _of(cost: Cost, share: float, part: float, weights: float) -> Cost:
    """Scale a cost by `share` and `part`, but exclude `weights` bytes from scaling by `part`."""
    fixed = min(weights, cost.nbytes * share)
    nbytes = fixed + (cost.nbytes * share - fixed) * part
    return Cost(cost.flops * share * part, nbytes, cost.num_calls)
