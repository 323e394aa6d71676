"""Workloads: each layer's parameters, activations and arithmetic; memory needs of a step."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod


@dataclass(frozen=True, slots=True)
class Cost:
    """The amount of a task's work, independent of devices; cost models convert it to seconds.

    On a device, `nbytes` is memory traffic, and `num_calls` is the number of kernels. On a link,
    `nbytes` is traffic on the wire, and `num_calls` is the number of messages that are sent one
    after another. `num_syncs`: number of synchronisations of a GPU with its host.
    """

    flops: float = 0.0
    nbytes: float = 0.0
    num_calls: int = 0
    num_syncs: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.flops + other.flops,
            self.nbytes + other.nbytes,
            self.num_calls + other.num_calls,
            self.num_syncs + other.num_syncs,
        )


@dataclass(frozen=True, slots=True)
class Parameter:
    """A trainable tensor; its gradient has the same shape and `element_size` (bytes)."""

    name: str
    shape: tuple[int, ...]
    element_size: int = 4

    @property
    def numel(self) -> int:
        """Number of values."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, equal to those of its gradient."""
        return self.numel * self.element_size


@dataclass(frozen=True, slots=True)
class Layer:
    """A module with parameters, and the operations without parameters that follow it.

    Backward passes through these operations and then through the module, before the layer's
    gradients are ready. A parameter shared by several layers belongs to the first of them.
    `parameters` are in the order in which their gradients become ready. `kind`: class of the
    module, such as "Linear"; "" if unknown.

    Costs and bytes are for the whole micro-batch. `activation_nbytes`: bytes of the output.
    `kept_nbytes`: bytes of tensors kept for backward; None if unknown. `working_nbytes`: bytes that
    the layer's backward needs in addition to these tensors and to gradients; None if unknown.
    """

    name: str
    parameters: tuple[Parameter, ...]
    activation_nbytes: int
    forward: Cost
    backward: Cost
    kept_nbytes: int | None = None
    working_nbytes: int | None = None
    kind: str = field(default="", compare=False)

    @property
    def num_parameters(self) -> int:
        """Number of trainable values."""
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def gradient_nbytes(self) -> int:
        """Bytes of the layer's gradients."""
        return sum(parameter.nbytes for parameter in self.parameters)


@dataclass(frozen=True)
class Workload:
    """A worker's training step; batch size, costs and bytes are those of one micro-batch.

    `layers` are in forward order. `backward_order`: indices of the layers in the order in which
    their gradients become ready; for a chain of layers, the reverse. `input_nbytes`: bytes of the
    inputs. `num_accumulated`: number of the step's micro-batches before the last, whose gradients
    are accumulated without an exchange. `target_nbytes`: bytes of the loss's targets; None: one
    class number for each sample. `refused_cuts`: layers before which the model cannot be split in
    two, each with the reason.
    """

    name: str
    batch_size: int
    layers: tuple[Layer, ...]
    backward_order: tuple[int, ...]
    input_nbytes: int
    num_accumulated: int = 0
    target_nbytes: int | None = None
    refused_cuts: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"{self.name}: batch_size must be at least 1, not {self.batch_size}")
        if sorted(self.backward_order) != list(range(len(self.layers))):
            raise ValueError(f"{self.name}: backward_order must name each layer exactly once")
        names = [layer.name for layer in self.layers]
        if len(set(names)) != len(names):
            raise ValueError(f"{self.name}: layer names must be unique")

    @cached_property
    def num_parameters(self) -> int:
        """Number of trainable values of the model."""
        return sum(layer.num_parameters for layer in self.layers)

    @cached_property
    def gradient_nbytes(self) -> int:
        """Bytes of all gradients."""
        return sum(layer.gradient_nbytes for layer in self.layers)

    @cached_property
    def accumulated(self) -> Cost:
        """The cost of forward and backward of all micro-batches except the last."""
        each = Cost()
        for layer in self.layers:
            each = each + layer.forward + layer.backward
        count = self.num_accumulated
        return Cost(count * each.flops, count * each.nbytes, count * each.num_calls)

    @cached_property
    def in_backward_order(self) -> tuple[Layer, ...]:
        """The layers in the order in which their gradients become ready."""
        return tuple(self.layers[i] for i in self.backward_order)


# Memory peaks during backward, which frees kept tensors layer by layer and creates gradients. At
# each layer, memory is the sum of:
#
#     kept by the remaining layers + gradients of the finished layers + working memory of this layer

# Copies in memory for each parameter: its value, gradient and momentum.
_COPIES = 3
_TOO_MANY_SAMPLES = 2**41  # limit of `largest_batch`, reached only if samples need no memory


def state_nbytes(layers: Sequence[Layer]) -> int:
    """Return the bytes of parameters, gradients and momentum."""
    return _COPIES * sum(layer.gradient_nbytes for layer in layers)


def kept_nbytes(layers: Sequence[Layer]) -> int:
    """Return the bytes of feature maps that forward keeps for backward.

    Layers with unknown kept bytes are assumed to keep their output.
    """
    return sum(map(_kept, layers))


def feature_nbytes(layers: Sequence[Layer]) -> int:
    """Return the peak bytes of a step, not counting parameters, gradients and momentum.

    Assumes that backward passes through the layers in reverse.
    """
    return _peak_nbytes(layers[::-1], layers, gradients=False)


def replica_nbytes(workload: Workload) -> int:
    """Return the peak bytes of a replica that trains on a micro-batch."""
    gradients = workload.gradient_nbytes
    peak = _peak_nbytes(workload.in_backward_order, workload.layers, gradients=True)
    return (_COPIES - 1) * gradients + max(peak, gradients) + workload.input_nbytes


def _peak_nbytes(ready: Sequence[Layer], layers: Sequence[Layer], *, gradients: bool) -> int:
    """Return the peak bytes of backward, which visits layers in the order of `ready`.

    `layers`: the same layers in forward order. `gradients`: whether to include the gradients of
    parameters.
    """
    # If a layer's working memory is unknown, assume the largest (input + output) of all layers.
    sizes = [layer.activation_nbytes for layer in layers]
    pair = max(map(sum, zip(sizes, [0, *sizes], strict=False)), default=0)
    held, made, peak = kept_nbytes(ready), 0, 0
    for layer in ready:
        made += layer.gradient_nbytes if gradients else 0
        working = pair if layer.working_nbytes is None else layer.working_nbytes
        peak = max(peak, held + made + working)
        held -= _kept(layer)
    return peak


def _kept(layer: Layer) -> int:
    return layer.activation_nbytes if layer.kept_nbytes is None else layer.kept_nbytes


def largest_batch(workload: Workload, nbytes: float) -> int:
    """Return the largest batch with which a replica fits into `nbytes`; 0 if none fits.

    Assumes that kept and working bytes are proportional to the samples.
    """

    def needed(batch_size: int) -> int:
        factor = batch_size / workload.batch_size
        names = ("activation_nbytes", "kept_nbytes", "working_nbytes")
        layers = []
        for layer in workload.layers:
            known = {name: getattr(layer, name) for name in names}
            grown = {name: round(factor * n) for name, n in known.items() if n is not None}
            layers.append(replace(layer, **grown))
        inputs = round(factor * workload.input_nbytes)
        return replica_nbytes(replace(workload, layers=tuple(layers), input_nbytes=inputs))

    # `needed` grows with the batch size, so bisection finds the largest batch that fits.
    return bisect_right(range(1, _TOO_MANY_SAMPLES), nbytes, key=needed)
