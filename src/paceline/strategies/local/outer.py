"""The outer step: the group's parameters and momentum in host memory, the same bits everywhere.

    outer gradient of a worker  =  outer parameters - the worker's own
    momentum    =  outer_momentum * momentum + mean
    parameters -=  rate * (outer_momentum * momentum + mean)             SGD, Nesterov's

Each worker takes the step by itself from what all have sent. So every product is rounded before it
is added: fused, sums would have other bits on other processors.
"""

from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256

import torch
from torch import Tensor, nn

from paceline.checkpoints.tensor_file import Tensors
from paceline.core.errors import InvalidInput
from paceline.models.layers import layers_of
from paceline.strategies.local.config import Local

Fragment = tuple[nn.Parameter, ...]
_BLOCK = 1 << 16  # values: what is read and written of so many stays in a core's cache


def fragments_of(model: nn.Module, count: int) -> list[Fragment]:
    """Return the parameters of each fragment: layers `i`, `i + count` and so on, of fragment `i`.

    Raises InvalidInput if there are fewer layers than fragments, or parameters of other types than
    float32, or float64 alone.
    """
    layers = layers_of(model)
    if count > len(layers):
        raise InvalidInput(
            "fragments",
            f"{count} are more than the {len(layers)} layers",
            hint="take at most that many",
        )
    types = {one.dtype for layer in layers for _, one in layer.parameters}
    if len(types) > 1 or not types <= {torch.float32, torch.float64}:
        found = ", ".join(sorted(str(one).removeprefix("torch.") for one in types))
        raise InvalidInput(
            "parameters",
            f"of {found}",
            hint=(
                "strategy local averages those of float32 (bfloat16 is a matter of "
                "precision=bfloat16)"
            ),
        )
    return [
        tuple(one for layer in layers[number::count] for _, one in layer.parameters)
        for number in range(count)
    ]


def flatten(parameters: Iterable[Tensor]) -> Tensor:
    """Return a new vector of all values in host memory."""
    return torch.cat([one.detach().reshape(-1) for one in parameters]).cpu()


def is_finite(vector: Tensor) -> bool:
    """Return False if a value is NaN or infinite."""
    return all(bool(block.isfinite().all()) for block in vector.split(_BLOCK))


def weighted_sum(terms: Sequence[tuple[float, Tensor]]) -> Tensor:
    """Return the sum of vectors times their weights, added in this order."""
    total = torch.zeros_like(terms[0][1])
    for weight, values in terms:
        total.add_(values * weight)
    return total


class OuterModel:
    """The group's parameters and the outer momentum, by fragments, as flat vectors."""

    def __init__(self, fragments: Sequence[Fragment], config: Local) -> None:
        self._rate, self._momentum = config.outer_rate, config.outer_momentum
        self.values = [flatten(one) for one in fragments]
        self.momenta = [torch.zeros_like(one) for one in self.values]

    @property
    def nbytes(self) -> int:
        """The bytes of parameters and momentum."""
        return sum(one.nbytes for one in (*self.values, *self.momenta))

    def gradient(self, fragment: int, parameters: Fragment) -> Tensor:
        """Return how far a worker's parameters of a fragment are from the group's."""
        own = flatten(parameters)
        return torch.sub(self.values[fragment], own, out=own)

    def step(self, fragment: int, terms: Sequence[tuple[float, Tensor]]) -> None:
        """Take the outer step of a fragment, with the workers' shares and outer gradients."""
        shares = [share for share, _ in terms]
        vectors = self.values[fragment], self.momenta[fragment], *(one for _, one in terms)
        for values, momentum, *parts in zip(*(one.split(_BLOCK) for one in vectors), strict=True):
            mean = weighted_sum(list(zip(shares, parts, strict=True)))
            momentum.mul_(self._momentum).add_(mean)
            change = (momentum * self._momentum).add_(mean).mul_(self._rate)
            values.sub_(change)

    @torch.no_grad()
    def load_into(self, fragment: int, parameters: Fragment, mixing: float = 0.0) -> None:
        """Set a worker's parameters to `mixing` times its own, and the rest of the group's."""
        parts = self.values[fragment].split([one.numel() for one in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            group = part.view(parameter.shape).to(parameter.device)
            if mixing:
                group = (group * (1 - mixing)).add_(parameter * mixing)
            parameter.copy_(group)

    def digest(self, fragment: int) -> bytes:
        """Return a hash of a fragment's parameters and momentum, by which replicas are compared."""
        found = sha256()  # processors have instructions for it
        for vector in (self.values[fragment], self.momenta[fragment]):
            found.update(vector.numpy().data)
        return found.digest()

    def state(self) -> Tensors:
        """Return the vectors by their names; they are the live ones."""
        found = {f"values/{i}": one for i, one in enumerate(self.values)}
        return found | {f"momenta/{i}": one for i, one in enumerate(self.momenta)}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over vectors that `state` has named; InvalidInput if they are of other sizes."""
        own = self.state()
        for name, vector in own.items():
            found = state.get(name)
            if found is None or found.shape != vector.shape or found.dtype != vector.dtype:
                raise InvalidInput(
                    "outer state", f"{name} does not fit this model and its fragments"
                )
        for name, vector in own.items():
            vector.copy_(state[name])
