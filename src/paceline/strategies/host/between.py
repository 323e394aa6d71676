"""Sums of several machines: the first rank of each exchanges them with the other first ranks.

With a codec they travel encoded: chunks then overlap, and one is published when its sums are there.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.core.errors import InvalidInput, StepDiscarded
from paceline.core.plan import Kind
from paceline.exchange.agreement import check_same_codec
from paceline.exchange.codec_choice import choice_of, name_of
from paceline.exchange.compressed import CompressedAllReduce, Compression
from paceline.exchange.layout import Chunk
from paceline.links.arena import Arena
from paceline.links.group import Group
from paceline.record.recorder import Recorder
from paceline.strategies.host.transfer import changed_on_any

NO_WAY_BACK = (
    "across several machines a step cannot be taken back, because sums are under way: end the run"
)
_Step = tuple[int, tuple[Chunk, ...], Recorder | None]


class Between:
    """All ranks make one together; a thread of each machine's first rank does the work.

    It takes the chunks in their order, which all machines share, while backward goes on.
    """

    def __init__(
        self,
        arena: Arena,
        group: Group,
        deadline_s: float,
        compression: Compression | None = None,
    ) -> None:
        self._arena, self._deadline_s = arena, deadline_s
        self._chunks: tuple[Chunk, ...] = ()
        self._error: BaseException | None = None
        self._steps: queue.SimpleQueue[_Step | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[int] = queue.SimpleQueue()
        leaders = [group.global_ranks[leader] for leader in arena.leaders]
        self._leaders = dist.new_group(
            leaders,
            backend="gloo",
            timeout=timedelta(seconds=deadline_s),
            use_local_synchronization=True,
        )
        self._leads = group.rank in arena.leaders
        self._codec = name_of(compression.codec) if compression else None
        check_same_codec(self._codec, group)
        self._encoded: _Encoded | None = None
        if self._leads and compression is not None:
            self._encoded = _Encoded(compression, leaders, deadline_s)
        if self._leads:
            self._thread = threading.Thread(target=self._work, name="between", daemon=True)
            self._thread.start()

    def begin(self, step: int, chunks: tuple[Chunk, ...], recorder: Recorder | None) -> None:
        """Take on the step's chunks as they are summed on this machine."""
        if self._codec is not None and chunks is not self._chunks:
            _check_types(chunks)
        self._chunks = chunks
        if self._leads:
            self._steps.put((step, chunks, recorder))

    def finish(self) -> None:
        """Raise what went wrong in the thread; otherwise all chunks of the step are published."""
        if not self._leads:
            return
        # The thread has a deadline for each chunk: this one is for the thread.
        self._done.get(timeout=self._deadline_s * (len(self._chunks) + 1))
        if isinstance(self._error, StepDiscarded):
            raise InvalidInput(f"{self._error}; {NO_WAY_BACK}") from self._error
        if self._error is not None:
            raise self._error

    @property
    def why(self) -> str:
        """Say which codec is used, and on which figures that rests: as the first rank knows it."""
        return self._encoded.choice.why if self._encoded else f"{self._codec}: asked for"

    def close(self) -> None:
        """End the thread."""
        if self._leads:
            self._steps.put(None)
            self._thread.join()
        if self._encoded is not None:
            self._encoded.close()

    def _work(self) -> None:
        while (item := self._steps.get()) is not None:
            step, chunks, recorder = item
            try:
                if self._error is None:
                    self._exchange(step, chunks, recorder)
            except Exception as error:
                self._error = error
            self._done.put(step)

    def _exchange(self, step: int, chunks: Sequence[Chunk], recorder: Recorder | None) -> None:
        result = self._arena.shared_result(step)
        if self._encoded is not None:
            self._encoded.begin_step()
        for chunk in chunks:
            self._arena.wait_chunk(chunk.number)
            started = time.monotonic()
            if chunk is chunks[-1]:  # then all flags of this machine stand
                self._share_flags(step)
            done = partial(self._publish, chunk, started, recorder)
            if self._encoded is not None:
                self._encoded.begin(chunk, result, done)
                continue
            for part in parts_of(chunk, result):
                dist.all_reduce(part, group=self._leaders)
            done()
        if self._encoded is not None:
            self._encoded.finish()

    def _publish(self, chunk: Chunk, started: float, recorder: Recorder | None) -> None:
        if recorder is not None:
            recorder.add_exchange(Kind.SEND, str(chunk.number), started, time.monotonic())
        self._arena.publish(chunk.number)

    def _share_flags(self, step: int) -> None:
        changed = torch.tensor(changed_on_any(self._arena, step), dtype=torch.uint8)
        dist.all_reduce(changed, dist.ReduceOp.MAX, group=self._leaders)
        self._arena.flags[self._arena.local_rank, :, step % 2] = changed


class _Encoded:
    """The first ranks' exchange through a codec: one chunk on its way while another is decoded."""

    def __init__(self, compression: Compression, leaders: Sequence[int], deadline_s: float) -> None:
        self._all_reduce = CompressedAllReduce(leaders, torch.device("cpu"), deadline_s)
        try:
            self.choice = choice_of(compression.codec, self._all_reduce)
        except InvalidInput:
            self._all_reduce.close()
            raise
        self._pending: list[torch.futures.Future[None]] = []

    def begin_step(self) -> None:
        """Begin a step."""
        self._pending.clear()
        self._all_reduce.begin_step()
        self.choice.begin_step()

    def begin(self, chunk: Chunk, result: Tensor, done: Callable[[], None]) -> None:
        """Begin to exchange the sums of a chunk; `done` is called when that is over."""
        _clear_gaps(chunk, result)
        [part] = parts_of(chunk, result)
        name, codec = self.choice.codec_of(len(part))
        key = f"chunk{chunk.number}of{len(part)}/{name}"

        def publish(future: torch.futures.Future[Tensor]) -> None:
            future.value()  # raises what has gone wrong
            done()

        work = self._all_reduce.begin(key, part, codec)
        self._pending.append(work.future.then(publish))

    def finish(self) -> None:
        """Wait for all chunks of the step, and raise what went wrong."""
        for pending in self._pending:
            pending.wait()

    def close(self) -> None:
        """End the threads."""
        self._all_reduce.close()


def _check_types(chunks: Sequence[Chunk]) -> None:
    for slot in (slot for chunk in chunks for slot in chunk.slots):
        if slot.dtype != torch.float32:
            raise InvalidInput(
                f"codec: parameter {slot.name!r}: sums of {slot.parameter.dtype} are not encoded "
                "between machines; train in float32, or without a codec"
            )


def _clear_gaps(chunk: Chunk, result: Tensor) -> None:
    """Make zero again what lies between the sums: only codecs have written it, and add to it."""
    for slot, following in pairwise(chunk.slots):
        result[slot.offset + slot.nbytes : following.offset].zero_()


def parts_of(chunk: Chunk, result: Tensor) -> list[Tensor]:
    """Return the chunk's sums as flat tensors: one if all are of one type."""
    first, last = chunk.slots[0], chunk.slots[-1]
    dtypes = {slot.dtype for slot in chunk.slots}
    if len(dtypes) == 1:
        return [result[first.offset : last.offset + last.nbytes].view(dtypes.pop())]
    return [
        result[slot.offset : slot.offset + slot.nbytes].view(slot.dtype) for slot in chunk.slots
    ]
