"""Average the changes of independently training workers, and apply the mean as an outer step.

    outer gradient of a worker  =  outer parameters - the worker's parameters
    buffer             =  momentum * buffer + mean outer gradient
    outer parameters  -=  rate * (momentum * buffer + mean outer gradient)

The outer parameters are common to all workers; each worker has a copy in host memory. The outer
step is SGD with Nesterov momentum, where `buffer` is the momentum buffer. Each worker computes the
same outer step. Products are rounded before they are added, because fused operations would give
different bits on different processors. An exchange has three parts:

headers    all-gather     weight, whether parameters are finite, hash of the outer model
repair     broadcast      the first worker's outer model, if hashes differ
mean       all-reduce     float32 values, or pieces encoded by a codec (`encoded_pieces`)
"""

import logging
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from paceline.checkpoints.state import kind_of
from paceline.codecs.codec import Codec
from paceline.codecs.names import factory_of
from paceline.core.errors import InvalidInput
from paceline.core.rounds import OuterStep
from paceline.core.wire_format import PIECE
from paceline.exchange.encoded_pieces import PieceCodecs, encoded_piece
from paceline.exchange.inner_steps import InnerState
from paceline.links.failpoints import reach
from paceline.links.group import Group
from paceline.training.models.layers import layers_of

logger = logging.getLogger(__name__)

Fragment = tuple[nn.Parameter, ...]
OptimizerFactory = Callable[[list[Tensor]], Optimizer]
_BLOCK = 1 << 16  # number of values that are processed at a time, to stay in a core's cache


def fragments_of(model: nn.Module, count: int) -> list[Fragment]:
    """Divide the trainable parameters into `count` fragments, which are exchanged in turn.

    Fragment i has layers i, i + count, i + 2 count, and so on.
    """
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
    """Detach a tensor; if FSDP2 has sharded it, return this rank's shard."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def flatten(parameters: Iterable[Tensor], dtype: torch.dtype) -> Tensor:
    """Copy all parameters (if sharded, this rank's shards) into a new vector in host memory."""
    return torch.cat([local_of(one).reshape(-1).to("cpu", dtype) for one in parameters])


def _parts(vector: Tensor, parameters: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each parameter, or this rank's shard, with its values in a vector from `flatten`."""
    owned = [local_of(one) for one in parameters]
    for own, part in zip(owned, vector.split([one.numel() for one in owned]), strict=True):
        yield own, part.view(own.shape).to(own.device)


@torch.no_grad()
def load_vector(vector: Tensor, parameters: Iterable[Tensor], mixing: float = 0.0) -> None:
    """Load a vector from `flatten` into the parameters; `mixing`: weight of their old values."""
    for own, given in _parts(vector, parameters):
        own.copy_((given * (1 - mixing)).add_(own * mixing) if mixing else given)


@torch.no_grad()
def add_change(before: Tensor, after: Tensor, parameters: Iterable[Tensor]) -> None:
    """Add `after - before` to the parameters; both are vectors from `flatten`."""
    for own, change in _parts(after - before, parameters):
        own.copy_(own + change)


def is_finite(vector: Tensor) -> bool:
    """Return whether a vector has no NaN or infinite value, testing it block by block."""
    return all(bool(block.isfinite().all()) for block in vector.split(_BLOCK))


class OuterModel:
    """The workers' common parameters and momentum, as one flat vector per fragment of the model.

    The vectors are float64 if any parameter is float64, otherwise float32. `make([vector])`
    creates an optimizer that updates a vector. Without `make`, SGD with Nesterov momentum does.
    """

    def __init__(self, fragments: Sequence[Fragment], make: OptimizerFactory | None = None) -> None:
        types = {one.dtype for fragment in fragments for one in fragment}
        self.dtype = torch.float64 if torch.float64 in types else torch.float32
        self.values = [flatten(one, self.dtype) for one in fragments]
        self.momenta = [] if make else [torch.zeros_like(one) for one in self.values]
        self._optimizers = [make([one]) for one in self.values] if make else []

    def step(self, fragment: int, mean: Tensor, by: OuterStep) -> None:
        """Update a fragment by the mean outer gradient; `by`: learning rate and momentum."""
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
        # not a cryptographic hash, which would take longer than the outer step
        vectors = self.values[fragment], *self.momenta[fragment : fragment + 1]
        return "-".join(f"{torch.hash_tensor(one).item():x}" for one in vectors if len(one))

    def tensors(self) -> list[Tensor]:
        """Return the tensors that must be equal on all workers, uncopied and in a fixed order."""
        pairs = zip(self._optimizers, self.values, strict=False)
        kept = [one for optimizer, vector in pairs for one in optimizer.state[vector].values()]
        return [*self.values, *self.momenta, *(one for one in kept if isinstance(one, Tensor))]

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all parameters and momenta, and the states of custom optimizers."""
        return {
            "values": [one.clone() for one in self.values],
            "momenta": [one.clone() for one in self.momenta],
            "optimizers": [deepcopy(one.state_dict()) for one in self._optimizers],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a `state_dict`; raises InvalidInput if shapes or dtypes of its vectors differ."""
        own = {"values": self.values, "momenta": self.momenta}
        for name, vectors in own.items():
            if [*map(kind_of, vectors)] != [*map(kind_of, state[name])]:
                problem = f"is from another model or another number of fragments ({name} differ)"
                raise InvalidInput("state", problem)
        for name, vectors in own.items():
            for vector, saved in zip(vectors, state[name], strict=True):
                vector.copy_(saved)
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)


class Contribution(NamedTuple):
    """A worker's contribution to exchange `number`.

    `own`: the worker's parameters of fragment `fragment`. `weight`: the worker's weight in the
    mean: number of steps or samples since the fragment's last exchange. `buffers`: the model's
    buffers if this is the last exchange of a round (in which each fragment is exchanged once),
    otherwise empty. `is_closing`: whether the worker has finished training.
    """

    number: int
    fragment: int
    weight: float
    own: Tensor
    buffers: list[Tensor]
    is_closing: bool


@dataclass(frozen=True)
class Averaged:
    """The result of an exchange between workers.

    `given`: this worker's contribution. `mean`: mean outer gradient; None if no worker has trained
    since the last exchange. `left_out`: workers excluded because of NaN or infinite parameters.
    `repaired`: workers that loaded worker 0's outer model, because theirs differed. `all_closing`:
    whether all workers have finished training. `peer_state`: another worker's state, which this
    worker must load because it is new or late; otherwise None.
    """

    given: Contribution
    mean: Tensor | None
    left_out: tuple[int, ...]
    repaired: tuple[int, ...]
    all_closing: bool
    peer_state: InnerState | None = None

    def warn(self, number: int) -> None:
        """Log a warning for each worker that was left out or repaired in exchange `number`."""
        nonfinite = "exchange %d: worker %d has NaN or infinite parameters; loads the group's model"
        for worker in self.left_out:
            logger.warning(nonfinite, number, worker)
        for worker in self.repaired:
            logger.warning("exchange %d: worker %d loads worker 0's outer model", number, worker)


class Averaging:
    """Averages the workers' outer gradients, encoded by `codec` unless it is None.

    Raises InvalidInput for a codec if parameters are float64.
    """

    def __init__(self, outer: OuterModel, codec: str | Codec | None) -> None:
        if codec is not None and outer.dtype != torch.float32:
            raise InvalidInput("codec", "requires float32 parameters (some are float64)")
        self.outer = outer
        self._make_codec = None if codec is None else factory_of(codec)
        self.codecs = PieceCodecs()  # key: number of the fragment
        self.digest = ""  # hash of the last exchanged fragment, to send in the next header
        # values to send for each fragment in a rehearsal, which changes no parameters
        self.stand_ins: list[Tensor] = []
        self.nbytes = 0  # bytes sent; as many are received

    def run(self, given: Contribution, group: Group) -> Averaged:
        """Average a fragment over the workers of `group`; collective.

        Overwrites `given.own`. Raises InvalidInput if workers' exchange numbers differ, or if all
        workers' parameters are NaN or infinite.
        """
        is_fit = is_finite(given.own)
        weight = given.weight if is_fit else 0.0
        header = given.number, is_fit, weight, self.digest, given.is_closing
        reach("local.exchange", worker=group.rank, number=given.number, after="start")
        numbers, fit, weights, digests, closing = zip(*group.gather(header), strict=True)
        reach("local.exchange", worker=group.rank, number=given.number, after="headers")
        if len(set(numbers)) > 1:
            hint = "load the same checkpoint on all workers"
            raise InvalidInput(
                "num_exchanges", "must be equal on all workers", got=numbers, hint=hint
            )
        if not any(fit):
            problem = "is probably too large: all workers' parameters are NaN or infinite"
            raise InvalidInput("learning_rate", problem, hint="use a smaller one")
        repaired = tuple(rank for rank, one in enumerate(digests) if one != digests[0])
        if repaired:
            if group.rank in repaired:
                # if this broadcast fails, a unique hash makes the next exchange repair this worker
                self.digest = uuid.uuid4().hex
            group.broadcast(self.outer.tensors())
        group.broadcast(given.buffers)
        total = sum(weights)
        mean = None
        if total:
            share = weight / total * group.world_size
            mean = self._mean(given.fragment, given.own, share, group)
        reach("local.exchange", worker=group.rank, number=given.number, after="mean")
        left_out = tuple(rank for rank, one in enumerate(fit) if not one)
        return Averaged(given, mean, left_out, repaired, all(closing))

    def _mean(self, fragment: int, own: Tensor, share: float, group: Group) -> Tensor:
        """Return the weighted mean of all workers' outer gradients.

        `share`: this worker's weight, divided by the mean weight of all workers. `own`: this
        worker's parameters of the fragment, which are overwritten.
        """
        if share:
            gradient = torch.sub(self.outer.values[fragment], own, out=own)
            if self.stand_ins:
                gradient.copy_(self.stand_ins[fragment])
            if share != 1.0:
                gradient *= share
        else:  # zero_(), because multiplying NaN parameters by 0 gives NaN
            gradient = own.zero_()
        size, control, make = group.world_size, group.control, self._make_codec
        if size == 1 or control is None:
            return gradient
        with group.naming_lost_ranks():
            if make is None:
                dist.all_reduce(gradient, group=control)
                gradient /= size
                self.nbytes += 2 * (size - 1) * gradient.nbytes // size
                return gradient
            for number, values in enumerate(gradient.split(PIECE)):
                codecs = self.codecs.of(str(fragment), number, size, make)
                piece = encoded_piece(values, codecs, group.rank, float(size))
                self.nbytes += piece.scatter(control) + piece.gather(control)[0]
        return gradient
