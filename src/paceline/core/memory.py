"""What training keeps in a device's memory.

A step holds the most at some moment of backward. What forward has kept is freed layer by layer, and
in its place come the gradients of parameters:

    kept by the layers that are not done yet | gradients of those that are | one layer's work

The work is that of the layer whose backward runs: gradients of activations, and what operations
need for a moment.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from paceline.core.workload import Layer, Workload

# Values kept for each parameter: itself, its gradient, and the optimizer's momentum.
_COPIES = 3
_MOST_SAMPLES = 2**40  # beyond it, a model keeps nothing of a sample


def state_nbytes(layers: Sequence[Layer]) -> int:
    """Return the bytes of the layers' parameters, gradients and momentum."""
    return _COPIES * sum(layer.gradient_nbytes for layer in layers)


def kept_nbytes(layers: Sequence[Layer]) -> int:
    """Return the bytes that forward leaves for backward: the feature maps.

    Layers of which that is not known keep what they hand on.
    """
    return sum(map(_kept, layers))


def feature_nbytes(layers: Sequence[Layer]) -> int:
    """Return the most bytes that a step of the layers needs, but for parameters' copies.

    Backward is taken to go through the layers in reverse.
    """
    return max(_moments(layers[::-1], _largest_pair(layers), gradients=False), default=0)


def replica_nbytes(workload: Workload) -> int:
    """Return the most bytes that one whole replica needs at once to train on a micro-batch."""
    layers = workload.layers
    gradients = workload.gradient_nbytes
    pair = _largest_pair(layers)
    peak = max(_moments(workload.in_backward_order, pair, gradients=True), default=0)
    kept_copies = (_COPIES - 1) * gradients
    return kept_copies + max(peak, gradients) + workload.input_nbytes


def _moments(ready: Sequence[Layer], pair: int, *, gradients: bool) -> Iterator[int]:
    """Yield the bytes that are alive in each layer's backward, in the order of `ready`.

    With `gradients`, those of the parameters count that are there by then.
    """
    held, made = kept_nbytes(ready), 0
    for layer in ready:
        made += layer.gradient_nbytes if gradients else 0
        yield held + made + (pair if layer.working_nbytes is None else layer.working_nbytes)
        held -= _kept(layer)


def _kept(layer: Layer) -> int:
    return layer.activation_nbytes if layer.kept_nbytes is None else layer.kept_nbytes


def _largest_pair(layers: Sequence[Layer]) -> int:
    """Return the bytes of the gradients of the input and the output of a layer, at the most."""
    sizes = [layer.activation_nbytes for layer in layers]
    return max(map(sum, zip(sizes, [0, *sizes], strict=False)), default=0)


def largest_batch(workload: Workload, nbytes: float) -> int:
    """Return the most samples with which a replica is predicted to fit, 0 if it never does.

    What a workload keeps and works with is taken to grow with its samples.
    """
    low, high = 0, 1
    while high <= _MOST_SAMPLES and _of_batch(workload, high) <= nbytes:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _of_batch(workload, middle) <= nbytes else (low, middle)
    return low


def _of_batch(workload: Workload, batch_size: int) -> int:
    factor = batch_size / workload.batch_size

    def grown(nbytes: int | None) -> int | None:
        return None if nbytes is None else round(factor * nbytes)

    layers = tuple(
        replace(
            layer,
            activation_nbytes=round(factor * layer.activation_nbytes),
            kept_nbytes=grown(layer.kept_nbytes),
            working_nbytes=grown(layer.working_nbytes),
        )
        for layer in workload.layers
    )
    inputs = round(factor * workload.input_nbytes)
    return replica_nbytes(
        replace(workload, batch_size=batch_size, layers=layers, input_nbytes=inputs)
    )
