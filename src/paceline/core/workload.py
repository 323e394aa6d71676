"""What a model asks of a machine: per layer its parameters, its activations and its arithmetic."""

from dataclasses import dataclass
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
    are not known.
    """

    name: str
    parameters: tuple[Parameter, ...]
    activation_nbytes: int
    forward: Cost
    backward: Cost
    kept_nbytes: int | None = None
    working_nbytes: int | None = None

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
    network with branches. `input_nbytes` is what a micro-batch loads.
    """

    name: str
    batch_size: int
    layers: tuple[Layer, ...]
    backward_order: tuple[int, ...]
    input_nbytes: int

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

    @property
    def in_backward_order(self) -> tuple[Layer, ...]:
        """The layers as their gradients become ready."""
        return tuple(self.layers[i] for i in self.backward_order)
