"""The gate of the hub: what a worker sends is checked here before any other code sees it.

What fails is that worker's fault alone: it is refused or left out, and the others go on.
"""

from collections.abc import Sequence
from math import isfinite

from pydantic import TypeAdapter
from safetensors import SafetensorError
from safetensors.torch import load as tensors_of_bytes
from torch import Tensor

from paceline.checkpoints import json_values
from paceline.core.errors import InvalidInput, NonFinite
from paceline.core.reading import read_record
from paceline.rpc.frames import Message
from paceline.rpc.proportion import LARGEST_LOSS, Proportions, check_buffers, norm_of
from paceline.rpc.reading import check_spans
from paceline.strategies.local.exchange import Exchanged
from paceline.strategies.local.outer import is_finite
from paceline.strategies.local.protocol import (
    Done,
    OwnState,
    PartHeader,
    SavedHeader,
    Tested,
    decode,
    tensor_of,
    vectors_of,
)
from paceline.strategies.local.trace import Trace

_TRACE = TypeAdapter(Trace)
_MOST_ROUNDS = 3  # a part has the samples of no more, of all workers


class LeftOut(Exception):
    """A worker is not like the others, for the reason in the text: it takes the group's state."""


class NotFinite(LeftOut):
    """A worker's parameters or losses are NaN or infinite."""


class Gate:
    """Checks what the workers of one run send.

    `samples_per_round` are those of all workers, `num_tests` the samples that are tested on.
    `proportions` judge the outer gradients of workers that may be others than ours.
    """

    def __init__(
        self,
        exchanged: Exchanged,
        samples_per_round: float,
        num_epochs: int,
        num_tests: int,
        proportions: Proportions | None,
    ) -> None:
        self._exchanged, self._num_tests = exchanged, num_tests
        self._most_samples = _MOST_ROUNDS * samples_per_round
        self._num_epochs, self._proportions = num_epochs, proportions

    def part(self, message: Message) -> PartHeader:
        """Return the header of a part. Raises NotFinite, or InvalidInput for what cannot be."""
        header = decode(PartHeader, message)
        if len(message.parts) != header.num_buffers + 2:
            raise InvalidInput(
                "part",
                f"{len(message.parts)} parts",
                hint=f"a header, {header.num_buffers} of the gradient and one of buffers belong",
            )
        if not header.is_finite:
            raise NotFinite("has parameters that are NaN or infinite")
        most = self._most_samples
        if header.weight > most or sum(one.num_samples for one in header.losses) > most:
            raise InvalidInput("part", f"more samples than the {most:.0f} of {_MOST_ROUNDS} rounds")
        for loss in header.losses:
            if loss.epoch >= max(1, self._num_epochs):
                raise InvalidInput("part", f"a loss of epoch {loss.epoch} of {self._num_epochs}")
            _check_loss(loss.total, loss.num_samples, "training")
        return header

    def values(
        self, worker: int, fragment: int, header: PartHeader, buffers: Sequence[Tensor], steps: int
    ) -> Tensor:
        """Return the outer gradient of `steps` inner steps, decoded.

        InvalidInput if it is not one of the fragment, or out of all proportion.
        """
        values = self._exchanged.decode(fragment, buffers)
        if not is_finite(values):
            raise NotFinite("has sent an outer gradient with values that are NaN or infinite")
        if self._proportions is not None:
            own = self._exchanged.outer.values[fragment]
            norm = norm_of([values]) / max(1, steps)
            self._proportions.check(worker, norm, lambda: norm_of([own]))
        return values

    def buffers(self, message: Message, like: list[Tensor]) -> list[Tensor]:
        """Return the buffers, such as running means, at the end of a part."""
        found = vectors_of(message.parts[-1], like)
        try:
            check_buffers(found, like)
        except NonFinite as error:
            raise NotFinite(f"has {error}") from None
        return found

    def tested(self, message: Message) -> Tested:
        """Return a worker's part of a test."""
        found = decode(Tested, message)
        if found.num_samples > self._num_tests:
            raise InvalidInput(
                "tested", f"{found.num_samples} samples, of {self._num_tests} that there are"
            )
        _check_loss(found.loss, found.num_samples, "test")
        return found

    def own_state(self, message: Message) -> OwnState:
        """Return a worker's own state, which is read as it will be when it is taken up again."""
        header, parts = decode(SavedHeader, message), message.parts
        if len(parts) != 3:
            raise InvalidInput("saved", f"{len(parts)} parts, and not 3")
        own = OwnState(header, bytes(parts[1]), bytes(parts[2]))
        try:
            tensors_of_bytes(own.tensors)
            values = json_values.loads(own.values)
        except (SafetensorError, ValueError) as error:
            raise InvalidInput("saved", str(str(error)[:200])) from None
        if not isinstance(values, dict):
            raise InvalidInput("saved", "its values are no mapping of names")
        return own

    def done(self, worker: int, message: Message) -> tuple[Done, Trace]:
        """Return what a worker says in the end: of its parameters, and of its time."""
        if len(message.parts) != 2:
            raise InvalidInput("done", f"{len(message.parts)} parts, and not 2")
        header = decode(Done, message)
        trace = read_record(_TRACE, message.parts[1], "trace")
        if trace.worker != worker:
            raise InvalidInput("trace", f"of worker {trace.worker}")
        check_spans(trace.spans, worker, "trace")
        for times in (trace.sent_s, trace.received_s):
            if not all(exchange >= 0 and isfinite(at_s) for exchange, at_s in times.items()):
                raise InvalidInput("trace", "a message at a time that cannot be")
        return header, trace


def gradient_buffers(header: PartHeader, message: Message) -> tuple[Tensor, ...]:
    """Return the buffers of the encoded gradient in a part."""
    return tuple(map(tensor_of, message.parts[1 : 1 + header.num_buffers]))


def _check_loss(total: float, num_samples: int, what: str) -> None:
    """Raise NotFinite for a sum of losses that no run reaches which learns."""
    if not isfinite(total) or abs(total) > LARGEST_LOSS * max(1, num_samples):
        raise NotFinite(f"has a {what} loss that is NaN, infinite, or as good as that")
