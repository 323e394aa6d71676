"""Gradients summed by the host while backward goes on (Le et al. 2018, sections 3.1 and 4.1).

Each rank sends a chunk of gradients to shared memory as soon as backward has computed it (step
B-4-2), the host sums the chunks that all ranks have sent, and every rank gets the sums back (steps
B-4-3 and B-5-1) before it updates its own parameters (P-3). There is no server. Between machines,
the leaders, the first rank of each, all-reduce the sums.
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
from paceline.exchange.codec_choice import CodecAllReduce, name_of
from paceline.exchange.compressed import Compression
from paceline.exchange.layout import Chunk, Layout, check_same_codec
from paceline.exchange.optimizers import NonFiniteGuard
from paceline.exchange.replica import Statistics
from paceline.links.arena import Arena, Segment
from paceline.links.call_thread import CallThread
from paceline.links.devices import device_of
from paceline.links.group import Group
from paceline.record.recorder import Recorder
from paceline.strategies.host import transfer
from paceline.strategies.host.device_transfer import DeviceTransfer

_NO_WAY_BACK = (
    "across several machines a step cannot be taken back, because sums are under way: end the run"
)


class HostExchange:
    """One rank's side of the exchange through the arena of its machine.

    On CPUs gradients are views of the arena with `as_views`: the step after the next writes them.
    """

    name = "host"
    chunked = True

    def __init__(
        self, group: Group, as_views: bool = False, compression: Compression | None = None
    ) -> None:
        self.recorder: Recorder | None = None
        self._group, self._as_views, self._compression = group, as_views, compression
        self._step = 0
        self._chunks: tuple[Chunk, ...] = ()
        self._layout: Layout | None = None
        self._times = transfer.ExchangeTimes()
        self._between: LeaderAllReduce | None = None
        self._guard: NonFiniteGuard | None = None
        self._pinned: list[Callable[[], None]] = []

    def open(self, layout: Layout) -> None:
        """Make the arena, which every layout of the same gradients fits.

        InvalidInput on all ranks if parameters lie on several GPUs, or memory cannot be had.
        """
        _check_one_device(layout)
        sizes = layout.nbytes, len(layout.layers), layout.num_flags
        self._arena = Arena(self._group, *sizes, self._group.deadline_s)
        if len(self._arena.leaders) > 1:
            self._between = LeaderAllReduce(self._arena, self._group, self._compression)
            if self._compression is not None:
                self._guard = NonFiniteGuard(self._compression.on_nonfinite)
                self._guard.watch(slot.parameter for slot in layout.slots)
        # Setting an element of a tensor takes microseconds, for every parameter in every step.
        self._flags = self._arena.flags.numpy()
        self._pin(layout)
        self._set_layout(layout)

    def _pin(self, layout: Layout) -> None:
        """Pin the arena's memory for a GPU; InvalidInput on all ranks if one cannot."""
        device, problem = device_of(layout.slots[0].parameter.device), None
        memory = self._arena.slot, self._arena.shared_result(0), self._arena.shared_result(1)
        try:
            for part in memory if device.is_asynchronous else ():
                self._pinned.append(device.pin(part))
        except InvalidInput as error:
            problem = f"worker {self._group.rank}: {error}"
        problems = [one for one in self._group.gather(problem) if one is not None]
        if problems:
            raise InvalidInput.of(problems[0])

    def _set_layout(self, layout: Layout) -> None:
        if self._layout is not None:
            self._transfer.close()
        self._layout = layout
        self._transfer: transfer.CpuTransfer | DeviceTransfer
        if device_of(layout.slots[0].parameter.device).is_asynchronous:
            deadline_s = self._group.deadline_s
            self._transfer = DeviceTransfer(self._arena, layout, self._times, deadline_s)
        else:
            self._transfer = transfer.CpuTransfer(self._arena, layout, self._times, self._as_views)

    def arrange(self, layout: Layout, chunks: Sequence[Chunk]) -> None:
        """Exchange these chunks from the next step on."""
        # A tuner changes the chunks often, the layout stays.
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
        self._transfer.took(time.monotonic() - started)

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
            self._guard.found(self._num_nonfinite())
        ended = time.monotonic()
        self._transfer.took(ended - started)
        for chunk in self._chunks:
            posted, summed = self._arena.times(chunk.number)
            # What a chunk's exchange took before `finish` was called ran beside backward.
            self._transfer.took(hidden_s=max(0.0, min(summed, started) - posted))
            if self.recorder is not None:
                self.recorder.add_exchange(Kind.REDUCE, str(chunk.number), posted, summed)
                if self._between is not None and not self._between.is_leader:
                    # It waits for what its leader records, and joins in that.
                    self.recorder.add_exchange(Kind.SEND, str(chunk.number), summed, ended)
        return [changed > 0 for changed in transfer.changed_on_any(self._arena, self._step)]

    def times(self) -> list[ChunkTimes]:
        """Return when each chunk of the last step was posted by all ranks, and summed."""
        return [
            ChunkTimes(chunk.nbytes, *self._arena.times(chunk.number)) for chunk in self._chunks
        ]

    def discard(self) -> None:
        """Discard this step on all ranks, and wait until none works on it any more."""
        self._arena.discard()
        self._transfer.abandon()
        if self._between is not None:
            raise InvalidInput("exchange", "a backward pass failed on this rank", hint=_NO_WAY_BACK)

    def state(self) -> dict[str, Tensor]:
        """Return the error feedback of a leader's codecs."""
        return {} if self._between is None else self._between.state()

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Load the error feedback that the same rank has saved."""
        if self._between is not None:
            self._between.load_state(state)

    def statistics(self) -> Statistics:
        """Return the traffic and time so far; waits for a GPU's last exchange."""
        if self._layout is not None:
            self._transfer.count_times()
        nbytes = sum(chunk.nbytes for chunk in self._chunks) * self._step
        chunk = len({slot.layer for slot in self._chunks[0].slots}) if self._chunks else None
        known = (
            self.name,
            self._step,
            nbytes,
            nbytes,
            self._times.exposed_s,
            self._times.hidden_s,
            chunk,
        )
        if self._between is None or self._guard is None:
            return Statistics(*known)
        found = self._guard.num_nonfinite, self._guard.num_skipped
        between = self._between
        return Statistics(*known, between.why, *found, sent_share=between.sent_share)

    def _num_nonfinite(self) -> int:
        """Return the number of this step's values that are NaN because one was not finite."""
        result = self._arena.shared_result(self._step)
        return sum(
            slot.parameter.numel()
            for chunk in self._chunks
            for part in _parts_of(chunk, result)
            # A sum with such a value is not decoded: all of the chunk is NaN.
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
            for unpin in self._pinned:
                unpin()
            self._pinned = []
            self._arena.close()


class LeaderAllReduce:
    """Sums over all machines, in a thread of each machine's leader while backward goes on.

    All ranks create it together. The chunks are taken in their order, the same on all machines.
    With a codec they overlap, and each is published when its sum has arrived.
    """

    def __init__(self, arena: Arena, group: Group, compression: Compression | None) -> None:
        self._arena, self._deadline_s = arena, group.deadline_s
        self._chunks: tuple[Chunk, ...] = ()
        leaders = [group.global_ranks[leader] for leader in arena.leaders]
        self._leaders = dist.new_group(
            leaders,
            backend="gloo",
            timeout=timedelta(seconds=group.deadline_s),
            use_local_synchronization=True,
        )
        self._codec = name_of(compression.codec) if compression else None
        check_same_codec(self._codec, group)
        self._thread: CallThread | None = None  # and what follows: of leaders alone
        self._exchanged: Future[None] | None = None  # the step that has begun
        self._encoded: CodecAllReduce | None = None
        if group.rank in arena.leaders:
            if compression is not None:
                cpu, deadline_s = torch.device("cpu"), group.deadline_s
                self._encoded = CodecAllReduce(compression.codec, leaders, cpu, deadline_s)
            self._thread = CallThread("between")

    @property
    def is_leader(self) -> bool:
        """True if this rank exchanges for all of its machine."""
        return self._thread is not None

    def begin(self, step: int, chunks: tuple[Chunk, ...], recorder: Recorder | None) -> None:
        """Begin a step: exchange its chunks as they are summed on this machine."""
        if self._codec is not None and chunks is not self._chunks:
            for slot in (slot for chunk in chunks for slot in chunk.slots):
                if slot.dtype != torch.float32:
                    raise InvalidInput(
                        "codec",
                        f"parameter {slot.name!r}: sums of {slot.parameter.dtype} are not encoded "
                        "between machines",
                        hint="train in float32, or without a codec",
                    )
        self._chunks = chunks
        if self._thread is not None:
            self._exchanged = self._thread.submit(partial(self._exchange, step, chunks, recorder))

    def finish(self) -> None:
        """Wait until all chunks of the step are published; raise the thread's error, if any."""
        if self._exchanged is None:
            return
        try:
            # Each wait of the thread has a deadline of its own, so that all of them bound this one.
            self._exchanged.result(self._deadline_s * (len(self._chunks) + 1))
        except StepDiscarded as error:
            raise InvalidInput("exchange", str(error), hint=_NO_WAY_BACK) from error

    def state(self) -> dict[str, Tensor]:
        """Return the error feedback of this leader's codecs."""
        return self._encoded.state_dict() if self._encoded else {}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Load the error feedback that the same leader has saved."""
        if self._encoded is not None:
            self._encoded.load_state_dict(state)

    @property
    def why(self) -> str:
        """The codec in use and the measurements behind it, which only the leader knows."""
        return self._encoded.why if self._encoded else f"{self._codec}: requested"

    @property
    def sent_share(self) -> float | None:
        """The share of the values that this leader has sent, if the codec leaves some out."""
        return self._encoded.sent_share if self._encoded else None

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.close(None)
        if self._encoded is not None:
            self._encoded.close()

    def _exchange(self, step: int, chunks: Sequence[Chunk], recorder: Recorder | None) -> None:
        result = self._arena.shared_result(step)
        if self._encoded is not None:
            self._encoded.begin_step()
        pending = []
        for chunk in chunks:
            self._arena.wait_chunk(chunk.number)
            started = time.monotonic()
            if chunk is chunks[-1]:  # summed last, so that all ranks here have set their flags
                changed = torch.tensor(
                    transfer.changed_on_any(self._arena, step), dtype=torch.uint8
                )
                dist.all_reduce(changed, dist.ReduceOp.MAX, group=self._leaders)
                self._arena.flags[self._arena.local_rank, :, step % 2] = changed
            publish = partial(self._publish, chunk, started, recorder)
            if self._encoded is not None:
                # One chunk travels while another is decoded.
                sums = _without_gaps(chunk, result)
                # Errors are fed back to the same values: a chunk of another size has others.
                work = self._encoded.reduce(f"chunk{chunk.number}of{len(sums)}", sums)
                pending.append(work.future.then(publish))
                continue
            for sums in _parts_of(chunk, result):
                dist.all_reduce(sums, group=self._leaders)
            publish()
        for future in pending:
            future.wait()  # raises what went wrong

    def _publish(
        self,
        chunk: Chunk,
        started: float,
        recorder: Recorder | None,
        exchanged: torch.futures.Future[Tensor] | None = None,
    ) -> None:
        if exchanged is not None:
            exchanged.value()  # raises what went wrong: then the chunk must not be published
        if recorder is not None:
            recorder.add_exchange(Kind.SEND, str(chunk.number), started, time.monotonic())
        self._arena.publish()


def _check_one_device(layout: Layout) -> None:
    first = layout.slots[0]
    for slot in layout.slots:
        if slot.parameter.device != first.parameter.device:
            raise InvalidInput(
                "model",
                f"parameter {slot.name!r} lies on {slot.parameter.device}, and {first.name!r} on "
                f"{first.parameter.device}: host exchanges the gradients of one device a rank",
                hint="choose exchange='allreduce' for a model on several",
            )


def _without_gaps(chunk: Chunk, result: Tensor) -> Tensor:
    """Return the chunk's sums, with zeros between them: what the last decoding wrote there."""
    for slot, following in pairwise(chunk.slots):
        result[slot.offset + slot.nbytes : following.offset].zero_()
    [sums] = _parts_of(chunk, result)
    return sums


def _parts_of(chunk: Chunk, result: Tensor) -> list[Tensor]:
    """Return the chunk's sums as flat tensors: one if all are of one type."""
    first, last = chunk.slots[0], chunk.slots[-1]
    dtypes = {slot.dtype for slot in chunk.slots}
    if len(dtypes) == 1:
        return [result[first.offset : last.offset + last.nbytes].view(dtypes.pop())]
    return [
        result[slot.offset : slot.offset + slot.nbytes].view(slot.dtype) for slot in chunk.slots
    ]
