"""An encoded all-reduce that runs in the background.

Values are divided into pieces, which `encoded_pieces` exchanges.
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
from torch import Tensor

from paceline.codecs.codec import Codec
from paceline.core.errors import InvalidInput
from paceline.core.wire_format import PIECE, check_codec
from paceline.exchange.encoded_pieces import EncodedPiece, PieceCodecs, encoded_piece
from paceline.exchange.optimizers import Policy
from paceline.links.call_thread import CallThread, finish_stream
from paceline.links.devices import Event, device_of

Future = torch.futures.Future[Tensor]


@dataclass(frozen=True)
class Compression:
    """A codec for gradients, and a policy for NaN and infinite values.

    `codec`: a codec object, a name, or "auto", which encodes only if steps get faster.
    """

    codec: str | Codec
    on_nonfinite: Policy = "raise"

    def __post_init__(self) -> None:
        if isinstance(self.codec, str):
            check_codec(self.codec)
        elif isinstance(self.codec, type) or not hasattr(self.codec, "encode"):
            raise InvalidInput("codec", "must be a codec or its name", got=self.codec)


@dataclass(eq=False)
class Work:
    """One all-reduce; `future` receives the mean.

    `num_nonfinite`: number of NaN and infinite values, counted over all ranks. If there are any,
    all values become NaN.
    """

    key: str
    values: Tensor
    codec: Callable[[], Codec]
    divisor: float
    future: Future
    ready: Event | None
    num_nonfinite: int = 0
    _failing: threading.Lock = field(default_factory=threading.Lock)

    def fail(self, error: BaseException) -> None:
        """Set the future's error, if the future is not done; thread-safe."""
        with self._failing:
            if not self.future.done():
                self.future.set_exception(error)  # type: ignore[arg-type] # an error is a valid result here

    def failed_with(self, call: Call[None]) -> None:
        """Set the future's error, if `call` failed."""
        if (error := call.exception()) is not None:
            self.fail(error)


class CompressedAllReduce:
    """Runs all-reduces in order with a scatter thread and a gather thread.

    Ranks create it collectively and begin all-reduces in the same order. The scatters and the
    gathers have separate process groups, so that the scatter of one piece overlaps with the gather
    of another piece. Error feedback is stored by `key`. Collectives time out after `deadline_s`.
    """

    def __init__(self, ranks: Sequence[int], device: torch.device, deadline_s: float) -> None:
        own = device_of(device)
        self.device = own.torch_device
        self._bytes_sent = [0, 0]  # bytes sent by each thread
        self._ranks = list(ranks)
        self._rank = self._ranks.index(dist.get_rank())
        self._groups = [
            dist.new_group(
                self._ranks,
                timeout=timedelta(seconds=deadline_s),
                # values in host memory require gloo, even if the default group is nccl
                backend="gloo" if own.backend == "gloo" else None,
                # otherwise all ranks of the default group would have to call new_group
                use_local_synchronization=len(self._ranks) < dist.get_world_size(),
            )
            for _ in range(2)
        ]
        self._codecs = PieceCodecs()
        self._used: set[str] = set()
        self._is_void = False  # whether some values of the step were not finite
        self._scattering = CallThread("scatter", self.device)
        self._gathering = CallThread("gather", self.device)

    def begin_step(self) -> None:
        """Begin a step: drop error feedback of keys unused in the last step.

        All error feedback is dropped if values were not finite, because that step is skipped.
        """
        if self._is_void:
            self._codecs.keep(())
            self._is_void = False
        if self._used:
            self._codecs.keep(self._used)
        self._used.clear()

    @property
    def bytes_sent(self) -> int:
        """Bytes sent by this rank."""
        return sum(self._bytes_sent)

    def begin(
        self, key: str, values: Tensor, codec: Callable[[], Codec], divisor: float = 1.0
    ) -> Work:
        """Start to replace contiguous float32 values by (their sum over all ranks) / `divisor`."""
        ready, future, own = None, Future(), device_of(self.device)
        if own.is_asynchronous:
            ready = own.record()  # the scatter thread uses another stream
            future = Future(devices=[own.torch_device])
        self._used.add(key)
        work = Work(key, values, codec, divisor, future, ready)
        self._scattering.submit(partial(self._scatter, work)).add_done_callback(work.failed_with)
        return work

    def check_same(self, codec: str) -> None:
        """Raise InvalidInput if ranks have different codecs; collective."""
        own = torch.tensor([zlib.crc32(codec.encode())], device=self.device)
        found = [torch.zeros_like(own) for _ in self._ranks]
        dist.all_gather(found, own, group=self._groups[0])
        for rank, other in zip(self._ranks, found, strict=True):
            if not torch.equal(own, other):
                problem = f"must be equal on all ranks, but rank {rank} has another codec"
                raise InvalidInput("codec", problem, got=codec)

    def agree(self, values: Sequence[float]) -> list[float]:
        """Return each value's maximum over all ranks, collectively, while no all-reduce runs."""
        largest = torch.tensor(values, dtype=torch.float32, device=self.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._groups[0])
        return largest.tolist()

    def state_dict(self) -> dict[str, Tensor]:
        """Return this rank's error feedback."""
        return self._codecs.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load error feedback that the same rank saved; the number of ranks must be the same."""
        self._codecs.load_state_dict(state)

    def close(self) -> None:
        """End the threads after their work; abandon a thread that waits for a lost rank."""
        self._scattering.close()
        self._gathering.close()

    def _scatter(self, work: Work) -> None:
        if work.ready is not None:
            device_of(self.device).current_stream().wait_event(work.ready)
        pieces = work.values.split(PIECE)  # to overlap encoding with sending and decoding
        for number, values in enumerate(pieces):
            codecs = self._codecs.of(work.key, number, len(self._ranks), work.codec)
            piece = encoded_piece(values, codecs, self._rank, work.divisor)
            self._bytes_sent[0] += piece.scatter(self._groups[0])
            finish_stream(self.device)
            gather = partial(self._gather, work, piece, number == len(pieces) - 1)
            self._gathering.submit(gather).add_done_callback(work.failed_with)

    def _gather(self, work: Work, piece: EncodedPiece, is_last: bool) -> None:
        if work.future.done():
            return  # the scatter thread has failed
        nbytes, num_nonfinite = piece.gather(self._groups[1])
        finish_stream(self.device)
        self._bytes_sent[1] += nbytes
        work.num_nonfinite += num_nonfinite
        if not is_last:
            return
        if work.num_nonfinite:
            self._is_void = True
            work.values.fill_(torch.nan)  # so that a GradScaler or NonFiniteGuard detects it
            finish_stream(self.device)
        work.future.set_result(work.values)
