"""Workloads: parameters, activations and arithmetic of each layer, and the memory they need."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod


@dataclass(frozen=True, slots=True)
class Cost:
    """Work, never time: what has to be computed and moved. Cost models turn it into seconds.

    On a device `nbytes` is memory traffic and `num_calls` the kernels launched; on a link they are
    bytes on the wire and messages sent one after another (the beta and alpha of that model).
    `num_syncs` is how often a GPU has to tell its host how far it is.
    """

    flops: float = 0.0
    nbytes: float = 0.0
    num_calls: int = 0
    num_syncs: int = 0

    def __post_init__(self) -> None:
        if min(self.flops, self.nbytes, self.num_calls, self.num_syncs) < 0:
            raise ValueError(f"work cannot be negative: {self}")

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.flops + other.flops,
            self.nbytes + other.nbytes,
            self.num_calls + other.num_calls,
            self.num_syncs + other.num_syncs,
        )


@dataclass(frozen=True, slots=True)
class Parameter:
    """One trainable tensor: its gradient has the same shape and element size (bytes)."""

    name: str
    shape: tuple[int, ...]
    element_size: int = 4

    @property
    def numel(self) -> int:
        """Number of values."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, and of its gradient."""
        return self.numel * self.element_size


@dataclass(frozen=True, slots=True)
class Layer:
    """A module with parameters of its own, and the parameterless operations that follow it.

    The grouping is the one that a backward pass shows: the gradients of a layer are ready when all
    operations after it, and itself, have been differentiated. A parameter shared by several layers
    belongs to the first. `parameters` stand in the order in which their gradients become ready.
    Costs, `activation_nbytes` (what the layer hands on), `kept_nbytes` (what it keeps until
    backward reads it) and `working_nbytes` (what is alive in its backward beside what is kept and
    the gradients of parameters) are those of the whole micro-batch; the last two are None if they
    are not known. `kind` is the class of the module, such as "Linear"; "" if that is not known.
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
        """Trainable values."""
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def gradient_nbytes(self) -> int:
        """Bytes of all gradients of the layer."""
        return sum(parameter.nbytes for parameter in self.parameters)


@dataclass(frozen=True)
class Workload:
    """One training step of one worker on a micro-batch.

    `layers` stand in forward order. `backward_order` lists their indices in the order in which
    their gradients become ready; it is the reverse for a chain, and whatever autograd does for a
    network with branches. `input_nbytes` is what a micro-batch loads. `num_accumulated` equal
    micro-batches come before it in the step, whose gradients are added up and not exchanged.
    `target_nbytes`: of what the loss compares the outputs with; None: a class number a sample.
    `refused_cuts`: layers before which the model could not be cut in two when that was tried, each
    with the reason.
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
        """Trainable values of the whole model."""
        return sum(layer.num_parameters for layer in self.layers)

    @cached_property
    def gradient_nbytes(self) -> int:
        """Bytes of all gradients: what a float32 exchange has to move at the least."""
        return sum(layer.gradient_nbytes for layer in self.layers)

    @cached_property
    def accumulated(self) -> Cost:
        """The work of the micro-batches before the last one."""
        each = Cost()
        for layer in self.layers:
            each = each + layer.forward + layer.backward
        count = self.num_accumulated
        return Cost(count * each.flops, count * each.nbytes, count * each.num_calls)

    @cached_property
    def in_backward_order(self) -> tuple[Layer, ...]:
        """The layers as their gradients become ready."""
        return tuple(self.layers[i] for i in self.backward_order)


# A step holds the most at some moment of backward. What forward has kept is freed layer by layer,
# and in its place come the gradients of parameters:
#
#     kept by the layers that are not done yet | gradients of those that are | one layer's work
#
# The work is that of the layer whose backward runs: gradients of activations, and what operations
# need for a moment.

# Values kept for each parameter: itself, its gradient, and the optimizer's momentum.
_COPIES = 3
_TOO_MANY_SAMPLES = 2**41  # that these fit, too, means that a model keeps nothing of a sample


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
    return _peak_nbytes(layers[::-1], layers, gradients=False)


def replica_nbytes(workload: Workload) -> int:
    """Return the most bytes that one whole replica needs at once to train on a micro-batch."""
    gradients = workload.gradient_nbytes
    peak = _peak_nbytes(workload.in_backward_order, workload.layers, gradients=True)
    return (_COPIES - 1) * gradients + max(peak, gradients) + workload.input_nbytes


def _peak_nbytes(ready: Sequence[Layer], layers: Sequence[Layer], *, gradients: bool) -> int:
    """Return the most bytes alive in any layer's backward, which goes in the order of `ready`.

    `layers` stand in forward order. With `gradients`, those of the parameters count that are there
    by then.
    """
    # Where it is unknown what a layer works with, take the gradients of its input and its output.
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
    """Return the most samples with which a replica is predicted to fit, 0 if it never does.

    What a workload keeps and works with is taken to grow with its samples.
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

    # The place of `nbytes` among the needs of 1, 2, ... samples is the number that fit.
    return bisect_right(range(1, _TOO_MANY_SAMPLES), nbytes, key=needed)
