"""Cut a model into body (first layers) and split head (last layers); compute head costs."""

from dataclasses import dataclass, replace
from typing import NamedTuple, Self

from paceline.core.cost import update_cost
from paceline.core.cutting import refusal_of
from paceline.core.errors import InvalidInput
from paceline.core.names import did_you_mean
from paceline.core.workload import Cost, Layer, Parameter, Workload

_KINDS = ("Linear", "BatchNorm1d", "")  # types of layers that may be split; "": unknown type


@dataclass(frozen=True)
class Cut:
    """The body (first layers) as a workload, and the head (last layers) in forward order."""

    body: Workload
    head: tuple[Layer, ...]

    @property
    def rows_per_sample(self) -> int:
        """Rows per sample in the head: 1, or the number of tokens per sample."""
        matrix = matrix_of(self.head[0])
        assert matrix is not None  # a head begins with a linear layer
        row_nbytes = matrix.shape[1] * matrix.element_size
        handed_on = self.body.layers[-1].activation_nbytes / self.body.batch_size
        return max(1, round(handed_on / row_nbytes))


def cut(workload: Workload, first: str | None, workers: int) -> Cut:
    """Cut a model into its body, and a head that begins with the layer `first`.

    If `first` is None, the head is as long as possible. A head cannot begin with the model's first
    layer, nor with a layer in `workload.refused_cuts`. Raises InvalidInput if there is no such
    head, if a layer of it cannot be split, or if it has fewer outputs than there are workers.
    """
    start = _found(workload) if first is None else _named(workload, first)
    for layer in workload.layers[start:]:
        if num_outputs(layer) < workers:
            raise InvalidInput(
                "workers",
                f"must be at most the {num_outputs(layer)} outputs of layer {layer.name!r}",
                got=workers,
                hint="use fewer workers, or a head that begins after this layer",
            )
    order = tuple(i for i in workload.backward_order if i < start)
    body = replace(workload, layers=workload.layers[:start], backward_order=order)
    return Cut(body, workload.layers[start:])


def matrix_of(layer: Layer) -> Parameter | None:
    """Return a linear layer's weight, of shape (outputs, inputs); None for BatchNorm1d."""
    return next((one for one in layer.parameters if len(one.shape) == 2), None)


def num_outputs(layer: Layer) -> int:
    """Return a layer's number of outputs per row."""
    return (matrix_of(layer) or layer.parameters[0]).shape[0]


def shares(count: int, workers: int) -> list[int]:
    """Split `count` into `workers` nearly equal parts, larger parts first; leave out zeros."""
    whole, rest = divmod(count, workers)
    return [part for i in range(workers) if (part := whole + (i < rest))]


def _named(workload: Workload, first: str) -> int:
    names = [layer.name for layer in workload.layers]
    if first not in names:
        near = did_you_mean(first, names) or f"choose one of {', '.join(names[-10:])}"
        raise InvalidInput("head", f"is not a layer of {workload.name}", got=first, hint=near)
    start = names.index(first)
    if not start:
        raise InvalidInput("head", f"must begin after the first layer, {first!r}")
    if why := refusal_of(workload, first):
        raise InvalidInput.of(why)
    problem = _problem(workload, start)
    if problem is None and matrix_of(workload.layers[start]) is None:
        problem = f"layer {first!r} is not linear"
    if problem is None and not _comes_first(workload, start):
        problem = f"backward must run {first!r} and the layers after it before all others"
    if problem is not None:
        raise InvalidInput("head", f"cannot be split: {problem}", got=first)
    return start


def _found(workload: Workload) -> int:
    layers, found = workload.layers, None
    for start in range(len(layers) - 1, 0, -1):
        if _problem(workload, start) is not None or not _comes_first(workload, start):
            break
        is_linear = matrix_of(layers[start]) is not None
        if is_linear and refusal_of(workload, layers[start].name) is None:
            found = start
    if found is None and workload.refused_cuts:
        raise InvalidInput.of(workload.refused_cuts[0][1])
    if found is None:
        reason = _problem(workload, len(layers) - 1)
        reason = reason or f"layer {layers[-1].name!r} is not linear, or is the only layer"
        raise InvalidInput(
            "head", f"requires untied linear layers at the end of {workload.name}: {reason}"
        )
    return found


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
        """Add the cost of the weight update to the part of backward that computes its gradients."""
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
    """Scale a cost by `share`, then by `part`; `part` leaves out `weights` bytes of traffic."""
    fixed = min(weights, cost.nbytes * share)
    nbytes = fixed + (cost.nbytes * share - fixed) * part
    return Cost(cost.flops * share * part, nbytes, cost.num_calls)
