"""Sums of several machines: the first rank of each exchanges them with the other first ranks."""

import queue
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.core.errors import InvalidInput, StepDiscarded
from paceline.core.plan import Kind
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

    def __init__(self, arena: Arena, group: Group, deadline_s: float) -> None:
        self._arena, self._deadline_s = arena, deadline_s
        self._chunks: tuple[Chunk, ...] = ()
        self._error: BaseException | None = None
        self._steps: queue.SimpleQueue[_Step | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._leaders = dist.new_group(
            list(arena.leaders), backend="gloo", timeout=timedelta(seconds=deadline_s)
        )
        self._leads = group.rank in arena.leaders
        if self._leads:
            self._thread = threading.Thread(target=self._work, name="between", daemon=True)
            self._thread.start()

    def begin(self, step: int, chunks: tuple[Chunk, ...], recorder: Recorder | None) -> None:
        """Take on the step's chunks as they are summed on this machine."""
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

    def close(self) -> None:
        """End the thread."""
        if self._leads:
            self._steps.put(None)
            self._thread.join()

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
        for chunk in chunks:
            self._arena.wait_chunk(chunk.number)
            started = time.monotonic()
            for part in _parts(chunk, result):
                dist.all_reduce(part, group=self._leaders)
            if recorder is not None:
                number = str(chunk.number)
                recorder.add_exchange(Kind.SEND, number, started, time.monotonic())
            if chunk is chunks[-1]:  # then all flags of this machine stand
                self._share_flags(step)
            self._arena.publish(chunk.number)

    def _share_flags(self, step: int) -> None:
        changed = torch.tensor(changed_on_any(self._arena, step), dtype=torch.uint8)
        dist.all_reduce(changed, dist.ReduceOp.MAX, group=self._leaders)
        self._arena.flags[self._arena.local_rank, :, step % 2] = changed


def _parts(chunk: Chunk, result: Tensor) -> list[Tensor]:
    """Return the chunk's sums as flat tensors: one if all are of one type."""
    first, last = chunk.slots[0], chunk.slots[-1]
    dtypes = {slot.parameter.dtype for slot in chunk.slots}
    if len(dtypes) == 1:
        return [result[first.offset : last.offset + last.nbytes].view(dtypes.pop())]
    return [
        result[slot.offset : slot.offset + slot.nbytes].view(slot.parameter.dtype)
        for slot in chunk.slots
    ]
