"""What training keeps in a device's memory."""

from collections.abc import Sequence

from paceline.core.workload import Layer, Workload

# Values kept for each parameter: itself, its gradient, and the optimizer's momentum.
_COPIES = 3


def state_nbytes(layers: Sequence[Layer]) -> int:
    """Return the bytes of the layers' parameters, gradients and momentum."""
    return _COPIES * sum(layer.gradient_nbytes for layer in layers)


def feature_nbytes(layers: Sequence[Layer]) -> int:
    """Return the bytes that the layers keep for backward, and of the largest gradients.

    Layers of which that is not known keep what they hand on. Backward needs the gradients of one
    layer's input and output at a time.
    """
    sizes = [layer.activation_nbytes for layer in layers]
    kept = sum(
        layer.activation_nbytes if layer.kept_nbytes is None else layer.kept_nbytes
        for layer in layers
    )
    return kept + max(map(sum, zip(sizes, [0, *sizes], strict=False)), default=0)


def replica_nbytes(workload: Workload) -> int:
    """Return the bytes of one whole replica that trains on a micro-batch."""
    layers = workload.layers
    return state_nbytes(layers) + feature_nbytes(layers) + workload.input_nbytes
