"""Sum gradients in host memory during backward (Le et al. 2018, sections 3.1 and 4.1).

Each rank copies a chunk of gradients to shared memory as soon as backward has computed the chunk
(B-4-2 in the paper's algorithm), and posts it: tells the other ranks that the copy is complete.
Idle ranks sum chunks that all ranks have posted (B-4-3). Every rank receives the sums (B-5-1) and
updates its own parameters (P-3). The first rank of a machine is the machine's leader. If there are
several machines, their leaders all-reduce the sums, and publish each result to their machine.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.core.chunks import ChunkTimes
from paceline.core.errors import InvalidInput, StepDiscarded
from paceline.core.plan import Kind
from paceline.exchange.compressed import CodecAllReduce, Compression, name_of
from paceline.exchange.layout import Chunk, Layout, check_same_codec
from paceline.exchange.optimizers import NonFiniteGuard
from paceline.exchange.replica import Exchange, Statistics
from paceline.links.arena import Arena
from paceline.links.call_thread import CallThread
from paceline.links.devices import device_of
from paceline.links.group import Group
from paceline.links.rendezvous import leave
from paceline.record.recorder import Recorder
from paceline.strategies.host import transfer

_NO_DISCARD = "a step on several machines cannot be discarded; end the run"


class HostExchange(Exchange):
    """One rank's exchange of gradients through the arena, the shared memory of its machine.

    `as_views`: after an exchange, a CPU worker's gradients are views of the arena, which are
    overwritten two steps later. `compression`: codec of the sums that leaders exchange.
    """

    def __init__(
        self, group: Group, as_views: bool = False, compression: Compression | None = None
    ) -> None:
        self._group, self._as_views, self._compression = group, as_views, compression
        self._step = 0
        self._chunks: tuple[Chunk, ...] = ()
        self._layout: Layout | None = None
        self._times = transfer.OverlapTimes()
        self._between: LeaderAllReduce | None = None
        self._guard: NonFiniteGuard | None = None
        self._pinned: list[Callable[[], None]] = []

    def open(self, layout: Layout) -> None:
        """Create the arena (shared memory), which is kept if `arrange` later changes the layout.

        Raises InvalidInput if this rank's parameters are on several devices. If any rank cannot get
        memory, all ranks raise InvalidInput.
        """
        _check_one_device(layout)
        sizes = layout.nbytes, len(layout.layers), layout.num_flags
        self._arena = Arena(self._group, *sizes, self._group.deadline_s)
        if len(self._arena.leaders) > 1:
            self._between = LeaderAllReduce(self._arena, self._group, self._compression, layout)
            self.encoded = self._between.encoded
            if self._compression is not None:
                self._guard = NonFiniteGuard(self._compression.on_nonfinite)
                self._guard.watch(slot.parameter for slot in layout.slots)
        # Set flags through a NumPy view: setting a single element of a tensor takes microseconds.
        self._flags = self._arena.flags.numpy()
        self._device = device_of(layout.slots[0].parameter.device)
        self._pin()
        self._set_layout(layout)

    def _pin(self) -> None:
        """Pin the arena's memory for a GPU; if any rank fails, raise InvalidInput on all ranks."""
        problem = None
        try:
            for part in (self._arena.slot, *map(self._arena.shared_result, (0, 1))):
                self._pinned.append(self._device.pin(part))
        except InvalidInput as error:
            problem = f"worker {self._group.rank}: {error}"
        self._group.check(problem)

    def _set_layout(self, layout: Layout) -> None:
        if self._layout is not None:
            self._transfer.close()
        self._layout = layout
        self._transfer: transfer.CpuTransfer | transfer.DeviceTransfer
        if self._device.is_asynchronous:
            deadline_s = self._group.deadline_s
            self._transfer = transfer.DeviceTransfer(self._arena, layout, self._times, deadline_s)
        else:
            self._transfer = transfer.CpuTransfer(self._arena, layout, self._as_views)

    def arrange(self, layout: Layout, chunks: Sequence[Chunk]) -> None:
        """Exchange these chunks from the next step on."""
        # A tuner often changes the chunks but not the layout: then keep the transfer and buffers.
        if layout is not self._layout:
            self._set_layout(layout)
        self._chunks = tuple(chunks)
        self._arena.set_chunks(
            [[(s.offset, s.num_values, s.dtype) for s in chunk.slots] for chunk in chunks]
        )

    def begin(self) -> None:
        """Begin the exchange of a step's gradients."""
        self._step += 1
        self._arena.begin(self._step)
        self._transfer.begin(self._step, self._chunks, self.recorder)
        if self._between is not None:
            self._between.begin(self._step, self._chunks, self.recorder)

    def ready(self, chunk: Chunk, touched: Sequence[bool]) -> None:
        """Copy the chunk's gradients to the arena, and tell the other ranks when this is done."""
        started = time.monotonic()
        row, parity = self._arena.local_rank, self._step % 2
        for slot in chunk.slots:
            self._flags[row, slot.index, parity] = touched[slot.index]
        self._transfer.send(chunk, self.recorder)
        self._took(exposed_s=time.monotonic() - started)

    def _took(self, exposed_s: float = 0.0, hidden_s: float = 0.0) -> None:
        """Add seconds to a CPU worker's exchange times; a GPU's times come from its events."""
        if not self._device.is_asynchronous:
            self._times.exposed_s += exposed_s
            self._times.hidden_s += hidden_s

    def finish(self, touched: Sequence[bool]) -> Sequence[bool]:
        """Wait for the sums of all chunks, and replace the gradients by their means."""
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
            self._guard.found(self._num_nonfinite())
        ended = time.monotonic()
        self._took(exposed_s=ended - started)
        for chunk in self._chunks:
            posted, summed = self._arena.times(chunk.number)
            # The part of a chunk's exchange that came before `finish` overlapped with backward.
            self._took(hidden_s=max(0.0, min(summed, started) - posted))
            if self.recorder is not None:
                self.recorder.add_exchange(Kind.REDUCE, str(chunk.number), posted, summed)
                if self._between is not None and not self._between.is_leader:
                    # Only the leader sends messages; other ranks record their wait as SEND.
                    self.recorder.add_exchange(Kind.SEND, str(chunk.number), summed, ended)
        return [changed > 0 for changed in transfer.changed_on_any(self._arena, self._step)]

    def times(self) -> list[ChunkTimes]:
        """Return when each chunk of the last step was posted by all ranks, and when summed."""
        return [
            ChunkTimes(chunk.nbytes, *self._arena.times(chunk.number)) for chunk in self._chunks
        ]

    def discard(self) -> None:
        """Discard this step on all ranks; raise InvalidInput if there are several machines."""
        self._arena.discard()
        self._transfer.abandon()
        if self._between is not None:
            raise InvalidInput("exchange", "backward has failed on this rank", hint=_NO_DISCARD)

    def statistics(self) -> Statistics:
        """Return the traffic and time so far; wait for the end of a GPU's last exchange."""
        if self._layout is not None:
            self._transfer.count_times()
        nbytes = sum(chunk.nbytes for chunk in self._chunks) * self._step
        chunk = len({slot.layer for slot in self._chunks[0].slots}) if self._chunks else None
        times = self._times.exposed_s, self._times.hidden_s
        known = "host", self._step, nbytes, nbytes, *times, chunk
        if self._between is None or self._guard is None:
            return Statistics(*known)
        encoded, found = self.encoded, (self._guard.num_nonfinite, self._guard.num_skipped)
        # Only leaders know how the codec was chosen (`why`). Other ranks show the requested codec.
        why = encoded.why if encoded else f"{self._between.codec}: requested"
        share = encoded.codecs.sent_share if encoded else None
        return Statistics(*known, why, *found, sent_share=share)

    def _num_nonfinite(self) -> int:
        """Return how many of this step's summed gradient values are NaN."""
        result = self._arena.shared_result(self._step)
        return sum(
            slot.parameter.numel()
            for chunk in self._chunks
            for part in _parts_of(chunk, result)
            # A codec turns a whole chunk into NaN if a value is not finite, so test one value.
            if len(part) and part[0].isnan()
            for slot in chunk.slots
        )

    def close(self) -> None:
        """End the threads, unpin the arena's memory, and release it."""
        if self._guard is not None:
            self._guard.close()
        if self._layout is not None:
            self._transfer.close()
            if self._between is not None:
                self._between.close()
            for unpin in self._pinned:
                unpin()
            self._pinned = []
            self._arena.close()


class LeaderAllReduce:
    """All-reduces sums between machines during backward; each machine's leader runs a thread.

    All ranks must call the constructor together. With a codec, sending a chunk and decoding the
    previous chunk overlap. Raises InvalidInput if ranks have different codecs, or if there is a
    codec and a gradient of `layout` is not float32.
    """

    def __init__(
        self, arena: Arena, group: Group, compression: Compression | None, layout: Layout
    ) -> None:
        self._arena, self._deadline_s = arena, group.deadline_s
        self._chunks: tuple[Chunk, ...] = ()
        leaders = [group.global_ranks[leader] for leader in arena.leaders]
        self._leaders, *encoding = (
            dist.new_group(
                leaders,
                backend="gloo",
                timeout=timedelta(seconds=group.deadline_s),
                # True allows ranks outside `group` not to call new_group
                use_local_synchronization=group.world_size < dist.get_world_size(),
            )
            for _ in range(3 if compression else 1)
        )
        self.codec = name_of(compression.codec) if compression else None
        check_same_codec(self.codec, group)
        if self.codec is not None:
            _check_encodable(layout)
        self.is_leader = group.rank in arena.leaders
        # Only leaders set the following attributes.
        self._thread: CallThread | None = None
        self._exchanged: Future[None] | None = None  # done when the current step is exchanged
        self.encoded: CodecAllReduce | None = None
        if self.is_leader:
            if compression is not None:
                cpu, deadline_s = torch.device("cpu"), group.deadline_s
                self.encoded = CodecAllReduce(compression.codec, leaders, cpu, deadline_s, encoding)
            self._thread = CallThread("between")

    def begin(self, step: int, chunks: tuple[Chunk, ...], recorder: Recorder | None) -> None:
        """Begin a step: the leader's thread exchanges each chunk that this machine has summed."""
        self._chunks = chunks
        if self._thread is not None:
            self._exchanged = self._thread.submit(partial(self._exchange, step, chunks, recorder))

    def finish(self) -> None:
        """On a leader, wait until its thread has published all sums; raise the thread's error."""
        if self._exchanged is None:
            return
        try:
            # The thread may wait for up to one deadline per chunk.
            self._exchanged.result(self._deadline_s * (len(self._chunks) + 1))
        except StepDiscarded as error:
            raise InvalidInput("exchange", str(error), hint=_NO_DISCARD) from error

    def close(self) -> None:
        """End the thread, and close the compressed all-reduce."""
        if self._thread is not None and self._thread.close(None):
            leave(self._leaders)
        if self.encoded is not None:
            self.encoded.close()

    def _exchange(self, step: int, chunks: Sequence[Chunk], recorder: Recorder | None) -> None:
        result = self._arena.shared_result(step)
        if self.encoded is not None:
            self.encoded.begin_step()
        pending = []
        for chunk in chunks:
            self._arena.wait_chunk(chunk.number)
            started = time.monotonic()
            # Once all ranks have posted the last chunk, the flags of changed gradients are final.
            if chunk is chunks[-1]:
                changed = torch.tensor(
                    transfer.changed_on_any(self._arena, step), dtype=torch.uint8
                )
                dist.all_reduce(changed, dist.ReduceOp.MAX, group=self._leaders)
                self._arena.flags[self._arena.local_rank, :, step % 2] = changed
            publish = partial(self._publish, chunk, started, recorder)
            if self.encoded is not None:
                # Do not wait here, so that the next chunk is sent while this chunk is decoded.
                sums = _without_gaps(chunk, result)
                # The codec keeps a chunk's error feedback under this name. The name contains the
                # number of values, because a tuner may change the size of chunk 0, for example.
                work = self.encoded.reduce(f"chunk{chunk.number}of{len(sums)}", sums)
                pending.append(work.future.then(publish))
                continue
            for sums in _parts_of(chunk, result):
                dist.all_reduce(sums, group=self._leaders)
            publish()
        for future in pending:
            future.wait()  # raises the exchange's error, if any

    def _publish(
        self,
        chunk: Chunk,
        started: float,
        recorder: Recorder | None,
        exchanged: torch.futures.Future[Tensor] | None = None,
    ) -> None:
        if exchanged is not None:
            exchanged.value()  # raises the exchange's error, so a failed chunk is not published
        if recorder is not None:
            recorder.add_exchange(Kind.SEND, str(chunk.number), started, time.monotonic())
        self._arena.publish()


def _check_one_device(layout: Layout) -> None:
    names = {slot.parameter.device: slot.name for slot in layout.slots}
    if len(names) > 1:
        found = " and ".join(f"{name!r} on {device}" for device, name in names.items())
        problem = f"has {found}, but exchange 'host' supports one device per rank"
        raise InvalidInput("model", problem, hint="choose exchange='allreduce'")


def _check_encodable(layout: Layout) -> None:
    for slot in layout.slots:
        if slot.dtype != torch.float32:
            problem = f"requires float32 gradients, but {slot.name!r} has {slot.parameter.dtype}"
            raise InvalidInput("codec", problem, hint="train in float32, or without a codec")


def _without_gaps(chunk: Chunk, result: Tensor) -> Tensor:
    """Return the chunk's sums as one flat tensor, with zeros in the gaps between parameters."""
    for slot, following in pairwise(chunk.slots):
        result[slot.offset + slot.nbytes : following.offset].zero_()
    [sums] = _parts_of(chunk, result)
    return sums


def _parts_of(chunk: Chunk, result: Tensor) -> list[Tensor]:
    """Return the chunk's sums: one flat tensor, or one per parameter if their dtypes differ."""
    dtypes = {slot.dtype for slot in chunk.slots}
    if len(dtypes) == 1:
        return [transfer.bytes_of(chunk, result).view(dtypes.pop())]
    return [
        result[slot.offset : slot.offset + slot.nbytes].view(slot.dtype) for slot in chunk.slots
    ]
