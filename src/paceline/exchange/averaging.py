"""Average outer gradients between workers, and keep their outer models equal.

headers    all-gather     steps since the last exchange, finite or not, hash of the outer model
repair     broadcast      the first worker's outer model, if hashes differ
mean       all-reduce     float32 values, or pieces encoded by a codec (`encoded_pieces`)
"""

import logging
import uuid
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.codecs.codec import Codec
from paceline.codecs.names import factory_of
from paceline.core.errors import InvalidInput
from paceline.core.wire_format import PIECE
from paceline.exchange.encoded_pieces import EncodedPiece, PieceCodecs
from paceline.exchange.outer import OuterModel, is_finite
from paceline.exchange.peer_state import InnerState
from paceline.links.failpoints import reach
from paceline.links.group import Group

logger = logging.getLogger(__name__)


class Contribution(NamedTuple):
    """A worker's contribution to exchange `number`: its parameters `own` of one fragment.

    `weight`: inner steps or samples since the fragment's last exchange. `buffers`: the model's
    buffers, sent only at the end of a round. `is_closing`: whether the worker has finished training.
    """

    number: int
    fragment: int
    weight: float
    own: Tensor
    buffers: list[Tensor]
    is_closing: bool


@dataclass(frozen=True)
class Averaged:
    """The result of an exchange.

    `given`: this worker's contribution. `mean`: mean outer gradient, None if no worker has trained.
    `left_out`: workers with NaN or infinite parameters. `repaired`: workers whose outer model
    differed from worker 0's. `all_closing`: whether all workers have finished training.
    `peer_state`: a peer's inner state, which a late or new worker loads.
    """

    given: Contribution
    mean: Tensor | None
    weight: float
    left_out: tuple[int, ...]
    repaired: tuple[int, ...]
    all_closing: bool
    peer_state: InnerState | None = None

    def warn(self, number: int) -> None:
        """Log the workers that were left out or repaired."""
        nonfinite = "exchange %d: worker %d has NaN or infinite parameters, and loads the group's"
        for worker in self.left_out:
            logger.warning(nonfinite, number, worker)
        for worker in self.repaired:
            logger.warning("exchange %d: worker %d loads worker 0's outer model", number, worker)


class Averaging:
    """Averages the outer gradients of a group's workers, encoded by `codec`.

    Raises InvalidInput for a codec with a float64 model.
    """

    def __init__(self, outer: OuterModel, codec: str | Codec | None) -> None:
        if codec is not None and outer.dtype != torch.float32:
            raise InvalidInput("codec", "requires float32 parameters (some are float64)")
        self.outer = outer
        self._make_codec = None if codec is None else factory_of(codec)
        self.codecs = PieceCodecs()  # the keys are fragments
        self.digest = ""  # hash of the outer model after its last step, for the next header
        self.stand_ins: list[Tensor] = []  # outer gradients of a rehearsal, by fragment
        self.nbytes_sent = self.nbytes_received = 0

    def run(self, given: Contribution, group: Group) -> Averaged:
        """Exchange a fragment with all workers of the group, collectively."""
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
            problem = "all workers' parameters are NaN or infinite"
            raise InvalidInput("learning_rate", problem, hint="use a smaller one")
        repaired = tuple(rank for rank, one in enumerate(digests) if one != digests[0])
        if repaired:
            if group.rank in repaired:
                # if the broadcast fails, this unique digest makes the next exchange broadcast again
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
        return Averaged(given, mean, total, left_out, repaired, all(closing))

    def _mean(self, fragment: int, own: Tensor, share: float, group: Group) -> Tensor:
        """Return the weighted mean of the workers' outer gradients."""
        if share:
            gradient = self.outer.gradient(fragment, own)
            if self.stand_ins:
                gradient.copy_(self.stand_ins[fragment])
            if share != 1.0:
                gradient *= share
        else:  # a product with zero would keep NaN
            gradient = own.zero_()
        size = group.world_size
        if size == 1:
            return gradient
        with group.naming_lost_ranks():
            if self._make_codec is None:
                dist.all_reduce(gradient, group=group.control)
                gradient /= size
                nbytes = 2 * (size - 1) * gradient.nbytes // size
                self.nbytes_sent += nbytes
                self.nbytes_received += nbytes
            else:
                self._encoded_mean(fragment, gradient, group)
        return gradient

    def _encoded_mean(self, fragment: int, gradient: Tensor, group: Group) -> None:
        size, control, make = group.world_size, group.control, self._make_codec
        assert control is not None
        assert make is not None
        for number, values in enumerate(gradient.split(PIECE)):
            codecs = self.codecs.of(str(fragment), number, size, make)
            piece = EncodedPiece.of(values, codecs, group.rank, float(size))
            nbytes = piece.scatter(control)
            nbytes += piece.gather(control)[0]
            self.nbytes_sent += nbytes
            self.nbytes_received += nbytes
