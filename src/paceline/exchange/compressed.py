"""An all-reduce of values that travel encoded, beside whatever its caller does meanwhile."""

import atexit
import queue
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.codecs.codec import Codec
from paceline.codecs.feedback import ErrorFeedback
from paceline.core.errors import InvalidInput
from paceline.core.wire_format import PIECE, check_codec
from paceline.exchange.nonfinite import Policy
from paceline.exchange.shards import Piece

_GOODBYE_S = 5.0

Future = torch.futures.Future[Tensor]


@dataclass(frozen=True)
class Compression:
    """How gradients travel: a codec or its name ("auto" for what pays), and what they must not be.

    `on_nonfinite` is the policy for NaN and infinite values.
    """

    codec: str | Codec
    on_nonfinite: Policy = "raise"

    def __post_init__(self) -> None:
        if isinstance(self.codec, str):
            check_codec(self.codec)
        elif isinstance(self.codec, type) or not hasattr(self.codec, "encode"):
            raise InvalidInput(f"codec: {self.codec!r} is neither the name of one nor a codec")


@dataclass(eq=False)
class Work:
    """One all-reduce: what becomes of it, and what it took on this rank.

    `future` has the values once they are the mean; all NaN if any of them were not finite on any
    rank: `num_nonfinite` in all. `seconds` are those that this rank has spent on it.
    """

    key: str
    values: Tensor
    codec: Callable[[], Codec]
    divisor: float
    future: Future
    ready: torch.cuda.Event | None
    num_nonfinite: int = 0
    seconds: list[float] = field(default_factory=lambda: [0.0, 0.0])  # of each thread
    _failing: threading.Lock = field(default_factory=threading.Lock)

    def fail(self, error: Exception) -> None:
        """Tell who waits that there will be no values; both threads may notice it at once."""
        with self._failing:
            if not self.future.done():
                self.future.set_exception(error)  # type: ignore[arg-type] # declared as a result


class CompressedAllReduce:
    """All-reduces one after another in two threads, of which one scatters and one gathers.

    The `ranks` make it together, all with the same codecs in the same order: each phase has a
    process group of its own. What codecs remember (error feedback) is kept for each `key`. No
    collective takes longer than `deadline_s`.
    """

    def __init__(self, ranks: Sequence[int], device: torch.device, deadline_s: float) -> None:
        self.device = device
        self._bytes_sent = [0, 0]  # by each thread
        self._ranks = list(ranks)
        self._rank = self._ranks.index(dist.get_rank())
        deadline = timedelta(seconds=deadline_s)
        some = len(self._ranks) < dist.get_world_size()
        self._groups = [
            dist.new_group(
                self._ranks,
                timeout=deadline,
                # Values in host memory can be sent, too, where the default group is nccl.
                backend="gloo" if device.type == "cpu" else None,
                use_local_synchronization=some,
            )
            for _ in range(2)
        ]
        self._codecs: dict[tuple[str, int, int], Codec] = {}
        self._errors: dict[str, Tensor] = {}
        self._used: set[str] = set()
        self._is_void = False  # the step: some values of it are not finite
        self._scattering: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._gathering: queue.SimpleQueue[tuple[Work, Piece, bool] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for name, target in (("scatter", self._scatter), ("gather", self._gather))
        ]
        for thread in self._threads:
            thread.start()
        # A thread that the interpreter ends within torch takes the process down with it.
        atexit.register(self.close)

    def begin_step(self) -> None:
        """Forget what codecs remember of keys that were not used since the last call.

        Forget all if values were not finite: what that step has lost must not be made up for.
        """
        if self._is_void:
            self._codecs, self._is_void = {}, False
        if self._used:
            self._codecs = {at: codec for at, codec in self._codecs.items() if at[0] in self._used}
        self._used.clear()

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has handed to the others."""
        return sum(self._bytes_sent)

    def begin(
        self, key: str, values: Tensor, codec: Callable[[], Codec], divisor: float = 1.0
    ) -> Work:
        """Begin to make the values, float32 and contiguous, their sum over all ranks divided."""
        on_gpu = self.device.type == "cuda"
        ready = torch.cuda.Event() if on_gpu else None
        if ready is not None:
            ready.record()
        self._used.add(key)
        future = Future(devices=[self.device] if on_gpu else None)
        work = Work(key, values, codec, divisor, future, ready)
        self._scattering.put(work)
        return work

    def check_same(self, codec: str) -> None:
        """Raise InvalidInput unless all ranks use a codec of that name. All call it together."""
        own = torch.tensor([zlib.crc32(codec.encode())], device=self.device)
        found = [torch.zeros_like(own) for _ in self._ranks]
        dist.all_gather(found, own, group=self._groups[0])
        for rank, other in zip(self._ranks, found, strict=True):
            if not torch.equal(own, other):
                raise InvalidInput(
                    f"codec: rank {rank} has another than rank {self._ranks[self._rank]}, which "
                    f"has {codec!r}; give all ranks the same"
                )

    def agree(self, values: Sequence[float]) -> list[float]:
        """Return the largest of each over all ranks. All call it together, when nothing is sent."""
        largest = torch.tensor(values, dtype=torch.float32, device=self.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._groups[0])
        return largest.tolist()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the errors that this rank's codecs have to make up for, for its checkpoint."""
        state = dict(self._errors)
        for (key, piece, shard), codec in self._codecs.items():
            if isinstance(codec, ErrorFeedback):
                for tensor in codec.state_dict().values():
                    state[f"{key}/{piece}/{shard}"] = tensor
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over the errors of a checkpoint, which the same rank of as many has written."""
        self._codecs.clear()
        self._errors = dict(state)

    def close(self) -> None:
        """End the threads, after what has begun; one that waits for a lost rank is left behind."""
        atexit.unregister(self.close)
        self._scattering.put(None)
        for thread in self._threads:
            thread.join(_GOODBYE_S)

    def _scatter(self) -> None:
        failure: Exception | None = None
        with self._on_own_stream():
            for work in iter(self._scattering.get, None):
                try:
                    _check_whole(failure)
                    self._begin_pieces(work)
                except Exception as error:
                    failure = error
                    work.fail(error)
        self._gathering.put(None)

    def _begin_pieces(self, work: Work) -> None:
        if work.ready is not None:
            work.ready.wait()
        pieces = work.values.split(PIECE)
        for number, values in enumerate(pieces):
            started = time.monotonic()
            codecs = [self._codec(work, number, shard) for shard in range(len(self._ranks))]
            piece = Piece(values, codecs, self._rank, work.divisor)
            self._bytes_sent[0] += piece.scatter(self._groups[0])
            self._finish_stream()
            work.seconds[0] += time.monotonic() - started
            self._gathering.put((work, piece, number == len(pieces) - 1))

    def _gather(self) -> None:
        failure: Exception | None = None
        with self._on_own_stream():
            for work, piece, is_last in iter(self._gathering.get, None):
                try:
                    _check_whole(failure)
                    if not work.future.done():
                        self._finish_piece(work, piece, is_last)
                except Exception as error:
                    failure = error
                    work.fail(error)

    def _finish_piece(self, work: Work, piece: Piece, is_last: bool) -> None:
        started = time.monotonic()
        nbytes, num_nonfinite = piece.gather(self._groups[1])
        self._finish_stream()
        self._bytes_sent[1] += nbytes
        work.num_nonfinite += num_nonfinite
        work.seconds[1] += time.monotonic() - started
        if is_last and work.num_nonfinite:
            self._is_void = True
            work.values.fill_(torch.nan)
            self._finish_stream()
        if is_last:
            work.future.set_result(work.values)

    def _codec(self, work: Work, piece: int, shard: int) -> Codec:
        """Return the codec of a shard; each has its own, because it may remember errors."""
        place = (work.key, piece, shard)
        if place not in self._codecs:
            codec = self._codecs[place] = work.codec()
            error = self._errors.pop(f"{work.key}/{piece}/{shard}", None)
            if error is not None and isinstance(codec, ErrorFeedback):
                codec.load_state_dict({"error": error})
        return self._codecs[place]

    def _on_own_stream(self) -> AbstractContextManager[object]:
        if self.device.type != "cuda":
            return nullcontext()
        torch.cuda.set_device(self.device)
        return torch.cuda.stream(torch.cuda.Stream(self.device))

    def _finish_stream(self) -> None:
        """Wait in this thread, so that no other needs to order its streams after this one's."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


def _check_whole(failure: Exception | None) -> None:
    """Raise what has gone wrong before: this rank's next collective would meet others' last one."""
    if failure is not None:
        raise failure
