"""Run all-reduces of encoded (compressed) tensors in two background threads.

Codec "auto" measures whether encoding makes steps faster. A tensor is divided into pieces, so that
pieces are encoded and sent at the same time; module `encoded_pieces` exchanges a single piece.
"""

import threading
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future as Call
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Event, Tensor

from paceline.codecs.codec import Cast, Codec
from paceline.codecs.names import factory_of, find_codec
from paceline.core.errors import InvalidInput
from paceline.core.wire_format import AUTO, PIECE, check_codec, wire_format
from paceline.exchange.encoded_pieces import EncodedPiece, PieceCodecs, encoded_piece
from paceline.exchange.optimizers import Policy
from paceline.exchange.trials import Trials
from paceline.links.call_thread import CallThread, finish_stream
from paceline.links.clock import clock_for
from paceline.links.devices import device_of
from paceline.links.rendezvous import leave

Future = torch.futures.Future[Tensor]
Factory = Callable[[], Codec]
_CODEC = wire_format(AUTO).name  # the codec that "auto" may use, and that predictions assume
_PLAIN = "float32"
_FACTORIES: dict[str, Factory] = {
    _PLAIN: partial(Cast, _PLAIN),
    _CODEC: partial(find_codec, _CODEC),
}


@dataclass(frozen=True)
class Compression:
    """A codec that compresses gradients, and a policy for NaN and infinite gradients.

    `codec`: a codec object, a name, or "auto", which encodes only if this makes steps faster.
    """

    codec: str | Codec
    on_nonfinite: Policy = "raise"

    def __post_init__(self) -> None:
        if isinstance(self.codec, str):
            check_codec(self.codec)
        elif isinstance(self.codec, type) or not hasattr(self.codec, "encode"):
            raise InvalidInput("codec", "must be a codec object or a codec's name", got=self.codec)


@dataclass(eq=False)
class Work:
    """One all-reduce: `future` receives the sum of all ranks' `values`, divided by `divisor`.

    `key`: key of the error feedback. `ready`: event on a GPU, after which `values` may be read.
    `num_nonfinite`: number of NaN and infinite values of all ranks; if not 0, all results are NaN.
    """

    key: str
    values: Tensor
    codec: Factory
    divisor: float
    future: Future
    ready: Event | None
    num_nonfinite: int = 0
    _failing: threading.Lock = field(default_factory=threading.Lock)

    def failed_with(self, call: Call[None]) -> None:
        """Make `future` raise the error of `call`, if any, unless `future` is done; thread-safe."""
        error = call.exception()
        with self._failing:
            if error is not None and not self.future.done():
                self.future.set_exception(error)  # type: ignore[arg-type] # an error is a valid result here


class CodecAllReduce:
    """Runs encoded all-reduces one after another, in two threads that scatter and gather pieces.

    `codec`: used by method `reduce`, while `begin` gets its own; "auto" encodes only if this makes
    steps faster. All ranks must create this object together, and begin all-reduces in
    the same order. The threads have separate process groups, so that one piece is scattered while
    another is gathered. `groups`: these two groups, by default new ones. Attribute `codecs` stores
    error feedback by key. Collectives time out after `deadline_s`. Raises InvalidInput if the
    ranks' codecs differ.
    """

    def __init__(
        self,
        codec: str | Codec,
        ranks: Sequence[int],
        device: torch.device,
        deadline_s: float,
        groups: Sequence[dist.ProcessGroup] = (),
    ) -> None:
        own = device_of(device)
        self.device = own.torch_device
        self._name = name_of(codec)
        self._ranks = list(ranks)
        self._rank = self._ranks.index(dist.get_rank())
        self._groups = list(groups) or [
            dist.new_group(
                self._ranks,
                timeout=timedelta(seconds=deadline_s),
                # tensors in host memory require gloo; the default group's backend may be nccl
                backend="gloo" if own.backend == "gloo" else None,
                # True allows ranks outside the new group not to call new_group
                use_local_synchronization=len(self._ranks) < dist.get_world_size(),
            )
            for _ in range(2)
        ]
        self._check_same()
        self.codecs = PieceCodecs()
        self._used: set[str] = set()
        self._is_void = False  # whether the current step had a NaN or infinite gradient
        self._scattering = CallThread("scatter", self.device)
        self._gathering = CallThread("gather", self.device)
        self._bytes_sent = [0, 0]  # one number for the scatter thread, one for the gather thread
        self._make = None if codec == AUTO else factory_of(codec)
        self._auto = Trials(_FACTORIES, clock_for(torch.device("cpu"))) if codec == AUTO else None

    @property
    def why(self) -> str:
        """The codec in use, and the reason for its choice."""
        return f"{self._name}: requested" if self._auto is None else self._auto.why

    @property
    def is_plain(self) -> bool:
        """Whether method `reduce` sends float32 values unencoded in this step."""
        return self._auto is not None and self._auto.name == _PLAIN

    def begin_step(self) -> None:
        """Begin a step; drop error feedback of keys that the last step did not use."""
        if self._is_void:  # the last step had NaN gradients and was skipped: drop error feedback
            self.codecs.keep(())
            self._is_void = False
        if self._used:
            self.codecs.keep(self._used)
        self._used.clear()
        if self._auto is not None:
            self._auto.exchanged()
            if self._auto.due:
                self._auto.finish_measurement(self.agree)

    @property
    def bytes_sent(self) -> int:
        """Number of bytes that this rank has sent so far."""
        return sum(self._bytes_sent)

    def reduce(self, key: str, values: Tensor, divisor: float = 1.0) -> Work:
        """Start an all-reduce as `begin` does, with the codec of this step."""
        name, make = self._name, self._make
        if self._auto is not None:
            name, make = self._auto.name, _FACTORIES[self._auto.name]
        assert make is not None
        return self.begin(f"{key}/{name}", values, make, divisor)

    def begin(self, key: str, values: Tensor, codec: Factory, divisor: float = 1.0) -> Work:
        """Start to replace `values` by (their sum over all ranks) / `divisor`, encoded by `codec`.

        `values` must be contiguous float32. `key`: key of the codecs' error feedback.
        """
        ready, future, own = None, Future(), device_of(self.device)
        if own.is_asynchronous:
            ready = own.record()  # the scatter thread, which uses another stream, waits for it
            future = Future(devices=[own.torch_device])
        self._used.add(key)
        work = Work(key, values, codec, divisor, future, ready)
        self._scattering.submit(partial(self._scatter, work)).add_done_callback(work.failed_with)
        return work

    def _check_same(self) -> None:
        """Raise InvalidInput if ranks have different codecs; collective."""
        own = torch.tensor([zlib.crc32(self._name.encode())], device=self.device)
        found = [torch.zeros_like(own) for _ in self._ranks]
        dist.all_gather(found, own, group=self._groups[0])
        for rank, other in zip(self._ranks, found, strict=True):
            if not torch.equal(own, other):
                problem = f"must be equal on all ranks, but rank {rank} has another codec"
                raise InvalidInput("codec", problem, got=self._name)

    def agree(self, values: Sequence[float]) -> list[float]:
        """Return each value's maximum over ranks; collective; call it only between all-reduces."""
        largest = torch.tensor(values, dtype=torch.float32, device=self.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._groups[0])
        return largest.tolist()

    def close(self) -> None:
        """End the threads after their last all-reduce; do not wait for a lost rank."""
        have_succeeded = [self._scattering.close(), self._gathering.close()]
        if all(have_succeeded):  # after an error, gloo could wait for a lost rank
            for group in self._groups:
                leave(group)

    def _scatter(self, work: Work) -> None:
        if work.ready is not None:
            device_of(self.device).current_stream().wait_event(work.ready)
        pieces = work.values.split(PIECE)  # so that a piece is encoded while another is sent
        for number, values in enumerate(pieces):
            codecs = self.codecs.of(work.key, number, len(self._ranks), work.codec)
            piece = encoded_piece(values, codecs, self._rank, work.divisor)
            self._bytes_sent[0] += piece.scatter(self._groups[0])
            finish_stream(self.device)
            gather = partial(self._gather, work, piece, number == len(pieces) - 1)
            self._gathering.submit(gather).add_done_callback(work.failed_with)

    def _gather(self, work: Work, piece: EncodedPiece, is_last: bool) -> None:
        if work.future.done():
            return  # another piece has failed, and its error is the result
        nbytes, num_nonfinite = piece.gather(self._groups[1])
        finish_stream(self.device)
        self._bytes_sent[1] += nbytes
        work.num_nonfinite += num_nonfinite
        if not is_last:
            return
        if work.num_nonfinite:
            self._is_void = True
            work.values.fill_(torch.nan)  # so that GradScaler or NonFiniteGuard skips the step
            finish_stream(self.device)
        work.future.set_result(work.values)


def name_of(codec: str | Codec) -> str:
    """Return the name of `codec`, by which ranks check that their codecs are equal."""
    return AUTO if codec == AUTO else factory_of(codec)().name
