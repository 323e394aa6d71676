"""Gradients summed by the host while backward goes on (Le et al. 2018, sections 3.1 and 4.1).

Each rank sends a chunk of gradients to shared memory as soon as backward has computed it (step
B-4-2), the host sums the chunks that all ranks have sent, and every rank gets the sums back (steps
B-4-3 and B-5-1) before it updates its own parameters (P-3). There is no server.
"""

import time
from collections.abc import Sequence
from dataclasses import replace

from paceline.core.errors import InvalidInput, StepDiscarded
from paceline.core.plan import Kind
from paceline.exchange.compressed import Compression
from paceline.exchange.layout import Chunk, Layout
from paceline.exchange.nonfinite import NonFiniteGuard
from paceline.exchange.replica import Statistics
from paceline.links.arena import Arena
from paceline.links.group import Group
from paceline.links.segment import Segment
from paceline.record.recorder import Recorder
from paceline.strategies.host.between import NO_WAY_BACK, Between, parts_of
from paceline.strategies.host.cpu import CpuTransfer
from paceline.strategies.host.cuda import CudaTransfer
from paceline.strategies.host.transfer import Transfer, changed_on_any
from paceline.tune.chunk import ChunkTimes


class HostExchange:
    """One rank's side of the exchange through the arena of its machine.

    On CPUs gradients are views of the arena with `as_views`: the step after the next writes them.
    """

    name = "host"
    chunked = True

    def __init__(
        self, group: Group, compression: Compression | None = None, as_views: bool = False
    ) -> None:
        self.recorder: Recorder | None = None
        self._group = group
        self._deadline_s = group.deadline_s
        self._as_views = as_views
        self._step = 0
        self._chunks: tuple[Chunk, ...] = ()
        self._layout: Layout | None = None
        self._exposed_s = self._hidden_s = 0.0
        self._between: Between | None = None
        self._compression = compression
        self._guard: NonFiniteGuard | None = None

    def open(self, layout: Layout) -> None:
        """Make the arena, which every layout of the same gradients fits."""
        self._arena = Arena.open(
            self._group, layout.nbytes, len(layout.layers), layout.num_flags, self._deadline_s
        )
        if len(self._arena.leaders) > 1:
            self._between = Between(self._arena, self._group, self._deadline_s, self._compression)
            if self._compression is not None:
                self._guard = NonFiniteGuard(self._compression.on_nonfinite)
                self._guard.watch(slot.parameter for slot in layout.slots)
        self._flags = self._arena.flags.numpy()
        self._set_layout(layout)

    def _set_layout(self, layout: Layout) -> None:
        if self._layout is not None:
            self._transfer.close()
        self._layout = layout
        self._transfer: Transfer
        if self._group.device.type == "cuda":
            self._transfer = CudaTransfer(self._arena, layout, self._deadline_s)
        else:
            self._transfer = CpuTransfer(self._arena, layout, self._as_views)

    def arrange(self, layout: Layout, chunks: Sequence[Chunk]) -> None:
        """Exchange these chunks from the next step on."""
        if layout is not self._layout:
            self._set_layout(layout)
        self._chunks = tuple(chunks)
        self._arena.set_chunks(
            [[Segment(s.offset, s.num_values, s.dtype) for s in chunk.slots] for chunk in chunks]
        )

    def begin(self) -> None:
        """Begin a step."""
        self._step += 1
        self._arena.begin(self._step)
        self._transfer.begin(self._step, self._chunks, self.recorder)
        if self._between is not None:
            self._between.begin(self._step, self._chunks, self.recorder)

    def ready(self, chunk: Chunk, touched: Sequence[bool]) -> None:
        """Send the chunk to the host."""
        started = time.monotonic()
        row, parity = self._arena.local_rank, self._step % 2
        for slot in chunk.slots:
            self._flags[row, slot.index, parity] = touched[slot.index]
        self._transfer.send(chunk, self.recorder)
        self._exposed_s += time.monotonic() - started

    def finish(self, touched: Sequence[bool]) -> Sequence[bool]:
        """Wait for the sums of all chunks, and take them over."""
        started = time.monotonic()
        try:
            self._transfer.arrive()
            self._arena.commit()
            if self._between is not None:
                self._between.finish()
            self._transfer.receive(self._step)
        except StepDiscarded:
            self._transfer.abandon()
            raise
        if self._guard is not None:
            self._guard.found(self._num_void())
        self._exposed_s += time.monotonic() - started
        times = [self._arena.times(chunk.number) for chunk in self._chunks]
        self._hidden_s += sum(max(0.0, min(end, started) - posted) for posted, end in times)
        if self.recorder is not None:
            for chunk, (posted, end) in zip(self._chunks, times, strict=True):
                self.recorder.add_exchange(Kind.REDUCE, str(chunk.number), posted, end)
        return [changed > 0 for changed in changed_on_any(self._arena, self._step)]

    def times(self) -> list[ChunkTimes]:
        """Return when each chunk of the last step was posted by all ranks, and summed."""
        times = [self._arena.times(chunk.number) for chunk in self._chunks]
        return [
            ChunkTimes(chunk.nbytes, posted_s, summed_s)
            for chunk, (posted_s, summed_s) in zip(self._chunks, times, strict=True)
        ]

    def discard(self) -> None:
        """Tell the others that this step is void, and wait until nobody works on it any more."""
        self._arena.discard()
        self._transfer.abandon()
        if self._between is not None:
            raise InvalidInput(f"a backward pass failed on this rank; {NO_WAY_BACK}")

    def statistics(self) -> Statistics:
        """Return what it has taken so far."""
        nbytes = sum(chunk.nbytes for chunk in self._chunks) * self._step
        chunk = len({slot.layer for slot in self._chunks[0].slots}) if self._chunks else None
        statistics = Statistics(
            self.name, self._step, nbytes, nbytes, self._exposed_s, self._hidden_s, chunk
        )
        if self._between is None or self._guard is None:
            return statistics
        return replace(
            statistics,
            codec=self._between.why,
            num_nonfinite=self._guard.num_nonfinite,
            num_skipped=self._guard.num_skipped,
        )

    def _num_void(self) -> int:
        """Return how many values of this step are NaN because one among them was not finite."""
        result = self._arena.shared_result(self._step)
        return sum(
            slot.parameter.numel()
            for chunk in self._chunks
            for part in parts_of(chunk, result)
            if len(part) and part[0].isnan()
            for slot in chunk.slots
        )

    def close(self) -> None:
        """Give the arena back."""
        if self._guard is not None:
            self._guard.close()
        if self._layout is not None:
            self._transfer.close()
            if self._between is not None:
                self._between.close()
            self._arena.close()
