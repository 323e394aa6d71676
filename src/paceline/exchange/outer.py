"""The outer model: the group's parameters in host memory, and the outer step.

    outer gradient of a worker  =  outer parameters - the worker's parameters
    buffer      =  momentum * buffer + mean outer gradient
    parameters -=  rate * (momentum * buffer + mean outer gradient)

The outer step is SGD with Nesterov momentum; `buffer` is its momentum buffer. Each worker takes the
same step. Products are rounded before they are added, because fused operations would give different
bits on different processors.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from paceline.checkpoints.state import kind_of
from paceline.core.errors import InvalidInput
from paceline.core.rounds import OuterStep
from paceline.training.models.layers import layers_of

Fragment = tuple[nn.Parameter, ...]
OptimizerFactory = Callable[[list[Tensor]], Optimizer]
_FACTOR = 6364136223846793005  # multiplier of Knuth's linear congruential generator
_BLOCK = 1 << 16  # values per block, so that reads and writes stay in a core's cache


def fragments_of(model: nn.Module, count: int) -> list[Fragment]:
    """Divide parameters into fragments: fragment `i` has layers `i`, `i + count`, ..."""
    layers = layers_of(model)
    if count > len(layers):
        problem = f"must be at most {len(layers)}, the number of trained layers"
        raise InvalidInput("fragments", problem, got=count)
    for layer in layers:
        for name, one in layer.parameters:
            if not one.dtype.is_floating_point:
                raise InvalidInput("parameters", f"must be floating-point ({name} is {one.dtype})")
    return [
        tuple(one for layer in layers[number::count] for _, one in layer.parameters)
        for number in range(count)
    ]


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor: the local shard if FSDP2 sharded it."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def flatten(parameters: Iterable[Tensor], dtype: torch.dtype) -> Tensor:
    """Copy all values into a new vector in host memory."""
    return torch.cat([local_of(one).reshape(-1).to("cpu", dtype) for one in parameters])


def _parts(vector: Tensor, parameters: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each parameter's local part, and its values in a vector from `flatten`."""
    owned = [local_of(one) for one in parameters]
    for own, part in zip(owned, vector.split([one.numel() for one in owned]), strict=True):
        yield own, part.view(own.shape).to(own.device)


@torch.no_grad()
def load_vector(vector: Tensor, parameters: Iterable[Tensor], mixing: float = 0.0) -> None:
    """Load a vector from `flatten`; `mixing`: weight of the parameters' previous values."""
    for own, given in _parts(vector, parameters):
        own.copy_((given * (1 - mixing)).add_(own * mixing) if mixing else given)


@torch.no_grad()
def add_change(before: Tensor, after: Tensor, parameters: Iterable[Tensor]) -> None:
    """Add the difference of two vectors from `flatten` to parameters."""
    for own, change in _parts(after - before, parameters):
        own.copy_(own + change)


def is_finite(vector: Tensor) -> bool:
    """Return whether all values are finite."""
    return all(bool(block.isfinite().all()) for block in vector.split(_BLOCK))


class OuterModel:
    """The group's parameters and outer optimizer state, as one flat vector per fragment.

    The vectors are float64 if any parameter is float64, otherwise float32. `make`: factory of a
    custom outer optimizer for one vector.
    """

    def __init__(self, fragments: Sequence[Fragment], make: OptimizerFactory | None = None) -> None:
        types = {one.dtype for fragment in fragments for one in fragment}
        self.dtype = torch.float64 if torch.float64 in types else torch.float32
        self.values = [flatten(one, self.dtype) for one in fragments]
        self.momenta = [] if make else [torch.zeros_like(one) for one in self.values]
        self._optimizers = [make([one]) for one in self.values] if make else []

    def gradient(self, fragment: int, own: Tensor) -> Tensor:
        """Overwrite a worker's vector `own` with the worker's outer gradient."""
        return torch.sub(self.values[fragment], own, out=own)

    def step(self, fragment: int, mean: Tensor, by: OuterStep) -> None:
        """Update a fragment with the mean outer gradient."""
        if self._optimizers:
            self.values[fragment].grad = mean
            self._optimizers[fragment].step()
            self.values[fragment].grad = None
            return
        vectors = self.values[fragment], self.momenta[fragment], mean
        for values, momentum, part in zip(*(one.split(_BLOCK) for one in vectors), strict=True):
            momentum.mul_(by.momentum).add_(part)
            values.sub_((momentum * by.momentum).add_(part).mul_(by.learning_rate))

    def digest(self, fragment: int) -> str:
        """Return a hash of a fragment's parameters and momentum, to compare workers."""
        # a cryptographic hash would take longer than the outer step
        found = 0
        for vectors in (self.values, self.momenta):
            for vector in vectors[fragment : fragment + 1]:
                for block in vector.view(torch.int32).split(_BLOCK):
                    found = (found * _FACTOR + int(block.sum())) % (1 << 64)
        return f"{found:x}"

    def tensors(self) -> list[Tensor]:
        """Return the tensors (no copies) that are equal on all workers, in a fixed order."""
        kept = [
            one.state[vector] for one, vector in zip(self._optimizers, self.values, strict=False)
        ]
        of_optimizers = [one for state in kept for one in state.values() if isinstance(one, Tensor)]
        return [*self.values, *self.momenta, *of_optimizers]

    def state_dict(self) -> dict[str, Any]:
        """Copy the vectors of all fragments, and the state of custom optimizers."""
        return {
            "values": [one.clone() for one in self.values],
            "momenta": [one.clone() for one in self.momenta],
            "optimizers": [deepcopy(one.state_dict()) for one in self._optimizers],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a `state_dict`; InvalidInput if it belongs to another model or other fragments."""
        own = {"values": self.values, "momenta": self.momenta}
        for name, vectors in own.items():
            sizes = [kind_of(one) for one in vectors]
            if sizes != [kind_of(one) for one in state[name]]:
                raise InvalidInput(
                    "outer", f"was saved for another model or for other fragments: {name} differs"
                )
        for name, vectors in own.items():
            for vector, saved in zip(vectors, state[name], strict=True):
                vector.copy_(saved)
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
