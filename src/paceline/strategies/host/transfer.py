"""Copy gradients between a worker and the arena, the shared memory of its machine's ranks.

A CPU worker copies its gradients itself. A GPU's copies use three streams (Le et al. 2018, section
3.1) and a flat buffer on the GPU with the arena's layout, so that one copy moves all gradients of a
chunk.

    compute     backward, gather 0 .. backward, gather 1 .. end of backward   wait, scatter, step
    to host               d2h 0 ................. d2h 1
    host                        post 0, sum 0 ...... post 1, sum 1
    to device                               h2d 0 .............. h2d 1

In the backward hook of a chunk's last gradient, the compute stream gathers the chunk's gradients
into the buffer, and after backward it scatters the means. The host does not wait for the GPU during
backward: once a chunk is in the arena's pinned memory, a thread posts it (tells the other ranks
that it is there), and another thread starts the copy back after the sum.
"""

from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Event, Tensor

from paceline.core.errors import WorkerLost
from paceline.core.plan import Kind
from paceline.exchange.layout import Chunk, Layout, Slot
from paceline.links.arena import Arena
from paceline.links.call_thread import CallThread
from paceline.links.devices import device_of
from paceline.record.recorder import Recorder, Role, noted


@dataclass
class OverlapTimes:
    """Total seconds of exchanges: `hidden_s` overlapped with backward, `exposed_s` did not."""

    exposed_s: float = 0.0
    hidden_s: float = 0.0


def bytes_of(chunk: Chunk, memory: Tensor) -> Tensor:
    """Return a view of the chunk's bytes in `memory`, which has the arena's layout."""
    first, last = chunk.slots[0], chunk.slots[-1]
    return memory[first.offset : last.offset + last.nbytes]


def changed_on_any(arena: Arena, step: int) -> list[int]:
    """Return for each parameter 1 if its gradient changed on any rank, otherwise 0."""
    changed: list[int] = arena.flags.numpy()[:, :, step % 2].max(0).tolist()
    return changed


class CpuTransfer:
    """Copies a CPU worker's gradients into the arena, and the means back.

    `as_views`: gradients become copy-on-write views of the means, which saves the copy back. After
    the program has modified gradients in place, for example to clip them, means are copied, because
    the page faults of writing to views would cost more.
    """

    def __init__(self, arena: Arena, layout: Layout, as_views: bool) -> None:
        self._arena, self._layout, self._as_views = arena, layout, as_views
        self._views: list[dict[int, Tensor]] = [
            {slot.index: slot.of(arena.result(parity)) for slot in layout.slots}
            for parity in (0, 1)
            if as_views
        ]
        self._own = {slot.index: slot.of(arena.slot) for slot in layout.slots}

    def begin(self, step: int, chunks: Sequence[Chunk], recorder: Recorder | None) -> None:
        """Do nothing, because `receive` waits for all chunks and then copies the means."""

    def send(self, chunk: Chunk, recorder: Recorder | None) -> None:
        """Copy the chunk's gradients into this rank's part of the arena, and post the chunk."""
        # Call the recorder directly: the wrapper `noted` takes as long as copying a small chunk.
        name = str(chunk.number)
        copying = recorder.begin(Kind.D2H, name, Role.ALONE) if recorder else None
        sources = []
        for slot in chunk.slots:
            gradient = slot.parameter.grad
            if gradient is None:
                self._own[slot.index].zero_()
            elif gradient.stride() == slot.stride:
                sources.append((slot.offset, gradient))
            else:
                self._own[slot.index].copy_(gradient)
        self._arena.copy_in(sources)
        if recorder is not None:
            recorder.end(copying)
        self._arena.post(chunk.number)

    def arrive(self) -> None:
        """Do nothing, because `send` returns only after posting its chunk."""

    def count_times(self) -> None:
        """Do nothing, because `HostExchange` itself measures a CPU worker's times."""

    @torch.no_grad()
    def receive(self, step: int) -> None:
        """Wait for all chunks' sums; load the means of gradients that any rank changed."""
        self._arena.wait_step()
        # If the program has written into views, copy means from now on: page faults cost more.
        if self._as_views and self._arena.refresh(step):
            self._as_views = False
        changed = changed_on_any(self._arena, step)
        for slot in self._layout.slots:
            if not changed[slot.index]:
                self._clone_if_view(slot)
            elif self._as_views:
                slot.parameter.grad = self._views[step % 2][slot.index]
            else:
                self._copy_out(slot, step)

    def abandon(self) -> None:
        """Do nothing, because no thread or copy of a discarded step can still run."""

    def _copy_out(self, slot: Slot, step: int) -> None:
        gradient = slot.parameter.grad
        if gradient is None or gradient.stride() != slot.stride or self._is_view(gradient, slot):
            # Do not copy into a view of the arena, because a later step would overwrite it.
            gradient = slot.parameter.grad = torch.empty_like(slot.parameter)
        self._arena.copy_out(step, slot.offset, gradient)

    def _clone_if_view(self, slot: Slot) -> None:
        """Clone a gradient that is a view, because a later step overwrites the arena."""
        gradient = slot.parameter.grad
        if gradient is not None and self._is_view(gradient, slot):
            slot.parameter.grad = gradient.clone()

    def _is_view(self, gradient: Tensor, slot: Slot) -> bool:
        address = gradient.data_ptr()
        return any(view[slot.index].data_ptr() == address for view in self._views)

    def close(self) -> None:
        """Clone gradients that are views, and release the arena's memory."""
        for slot in self._layout.slots:
            self._clone_if_view(slot)
        self._views, self._own = [], {}


@dataclass
class _StepTimes:
    """The GPU events of a step, from which the times of its exchange are computed.

    `gathers`: by chunk number, the events before and after gathering the chunk's gradients.
    `copied`: by chunk number, the event after the copy back. `end`: after the scatter of the means.
    """

    gathers: dict[int, tuple[Event, Event]] = field(default_factory=dict)
    copied: dict[int, Event] = field(default_factory=dict)
    backward_end: Event = field(init=False)
    end: Event = field(init=False)

    def exposed_s(self) -> float:
        """Return the seconds that delay compute: gathering, and from backward's end to `end`."""
        alone = [*self.gathers.values(), (self.backward_end, self.end)]
        return sum(begin.elapsed_time(end) for begin, end in alone) * 1e-3

    def hidden_s(self) -> float:
        """Return the seconds during backward in which at least one chunk was exchanged.

        A chunk's exchange lasts from the end of its gathering to the end of its copy back, so it
        includes waits for earlier chunks.
        """
        exchanges = [(self.gathers[number][1], end) for number, end in sorted(self.copied.items())]
        first, _ = exchanges[0]
        end_ms = first.elapsed_time(self.backward_end)
        spans = [(first.elapsed_time(a), first.elapsed_time(b)) for a, b in exchanges]
        hidden_ms, reached_ms = 0.0, float("-inf")
        for begin, copied in sorted(spans):  # count overlapping exchanges once
            hidden_ms += max(0.0, min(copied, end_ms) - max(begin, reached_ms))
            reached_ms = max(reached_ms, copied)
        return hidden_ms * 1e-3


class DeviceTransfer:
    """Copies a GPU's gradients to the arena's pinned memory, and copies the means back."""

    def __init__(
        self, arena: Arena, layout: Layout, times: OverlapTimes, deadline_s: float
    ) -> None:
        self._arena, self._layout, self._times = arena, layout, times
        self._deadline_s = deadline_s
        self._device = device_of(layout.slots[0].parameter.device)
        self._to_host, self._to_device = self._device.new_stream(), self._device.new_stream()
        self._buffer = torch.empty(
            layout.nbytes, dtype=torch.uint8, device=self._device.torch_device
        )
        self._parts = {slot.index: slot.of(self._buffer) for slot in layout.slots}
        # The buffer may be overwritten after this event.
        self._free = self._device.record()
        # `goes_on`: the threads accept further calls after an error, such as a discarded step.
        self._poster = CallThread("post", goes_on=True)
        self._fetcher = CallThread("fetch", goes_on=True)
        self._posted: list[Future[None]] = []
        self._fetched: list[Future[None]] = []
        self._now = _StepTimes()
        self._latest: _StepTimes | None = None  # the last step's times, if not yet counted

    def begin(self, step: int, chunks: Sequence[Chunk], recorder: Recorder | None) -> None:
        """Begin a step: a thread will copy each chunk back when its sum is ready."""
        self._now = _StepTimes()
        fetches = (partial(self._fetch, step, chunk, recorder) for chunk in chunks)
        self._fetched = [self._fetcher.submit(fetch) for fetch in fetches]

    def send(self, chunk: Chunk, recorder: Recorder | None) -> None:
        """Queue a chunk's copy to the host after the work of the current stream."""
        # The scatter of the previous step's means may still read the buffer on another stream.
        self._device.current_stream().wait_event(self._free)
        begin = self._device.record(timed=True)
        with noted(recorder, Kind.D2H, role=Role.PAUSE):
            self._gather(chunk)
        gathered = self._device.record(timed=True)
        self._now.gathers[chunk.number] = begin, gathered
        self._to_host.wait_event(gathered)  # wait for the gathering, not for later kernels
        with self._device.use(self._to_host):
            with noted(recorder, Kind.D2H, str(chunk.number), Role.ALONE):
                bytes_of(chunk, self._arena.slot).copy_(
                    bytes_of(chunk, self._buffer), non_blocking=True
                )
            arrived = self._device.record()
        self._posted.append(self._poster.submit(partial(self._post, chunk, arrived)))

    @torch.no_grad()
    def _gather(self, chunk: Chunk) -> None:
        """Copy gradients of any strides into the buffer; a missing gradient counts as zero."""
        parts, gradients = list[Tensor](), list[Tensor]()
        for slot in chunk.slots:
            if slot.parameter.grad is not None:
                parts.append(self._parts[slot.index])
                gradients.append(slot.parameter.grad)
        if len(parts) < len(chunk.slots):
            bytes_of(chunk, self._buffer).zero_()
        copy_all(parts, gradients)

    def arrive(self) -> None:
        """Wait until all chunks have been copied to the host and posted."""
        self._now.backward_end = self._device.record(timed=True)
        if error := self._join(self._posted):
            raise error

    def receive(self, step: int) -> None:
        """Wait for the sums of all chunks; queue copies of the means to gradients that changed.

        A gradient counts as changed if it changed on any rank. The host does not wait for these
        copies, so it can queue the optimizer's kernels.
        """
        # First join the fetching thread, so that all its waits for chunks end before `wait_step`.
        if error := self._join(self._fetched):
            raise error
        self._arena.wait_step()
        computing = self._device.current_stream()
        computing.wait_stream(self._to_device)
        self._scatter(changed_on_any(self._arena, step))
        self._count_latest()  # the GPU has finished the previous step, so its times are known
        self._now.end = self._free = self._device.record(timed=True)
        self._latest = self._now

    @torch.no_grad()
    def _scatter(self, changed: Sequence[int]) -> None:
        gradients = list[Tensor]()
        slots = [slot for slot in self._layout.slots if changed[slot.index]]
        for slot in slots:
            if slot.parameter.grad is None:
                slot.parameter.grad = torch.empty_like(slot.parameter)
            gradients.append(slot.parameter.grad)
        copy_all(gradients, [self._parts[slot.index] for slot in slots])

    def count_times(self) -> None:
        """Wait until the GPU has completed the latest step; add its times to the total."""
        if self._latest is not None:
            self._latest.end.synchronize()
        self._count_latest()

    def _count_latest(self) -> None:
        if self._latest is not None:
            self._times.exposed_s += self._latest.exposed_s()
            self._times.hidden_s += self._latest.hidden_s()
        self._latest = None

    def abandon(self) -> None:
        """Wait until the threads and copies of a discarded step have ended."""
        self._join(self._posted)
        self._join(self._fetched)
        # Wait for copies of sums back to the GPU: a late copy would overwrite the next step's
        # gradients. Copies to the host have ended, because the posting thread waits for each.
        self._to_device.synchronize()

    def _join(self, calls: list[Future[None]]) -> BaseException | None:
        """Wait for a thread's calls and forget them; return the first error, None if none failed.

        Raises WorkerLost if a call does not end within twice the group's deadline.
        """
        within_s = 2 * self._deadline_s  # because a call itself may wait for up to one deadline
        try:
            errors = [call.exception(within_s) for call in calls]
        except TimeoutError:
            raise WorkerLost(f"this rank's GPU did not respond within {within_s:g} s") from None
        calls.clear()
        return next((error for error in errors if error is not None), None)

    def close(self) -> None:
        """End the threads, and wait for the last copies."""
        self._poster.close(None)
        self._fetcher.close(None)
        self.count_times()
        self._device.synchronize()

    def _post(self, chunk: Chunk, arrived: Event) -> None:
        with self._device.use():
            arrived.synchronize()
        self._arena.post(chunk.number)

    def _fetch(self, step: int, chunk: Chunk, recorder: Recorder | None) -> None:
        self._arena.wait_chunk(chunk.number)
        sums = bytes_of(chunk, self._arena.shared_result(step))
        with self._device.use(self._to_device):
            with noted(recorder, Kind.H2D, str(chunk.number), Role.ALONE):
                bytes_of(chunk, self._buffer).copy_(sums, non_blocking=True)
            self._now.copied[chunk.number] = self._device.record(timed=True)


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors with few kernels.

    `_foreach_copy_` needs a kernel per tensor if dtypes or strides in its lists differ. So call it
    once per pair of dtypes, and copy tensors separately if source and target strides differ.
    """
    lists = defaultdict[object, tuple[list[Tensor], list[Tensor]]](lambda: ([], []))
    for target, source in zip(targets, sources, strict=True):
        if _have_same_strides(target, source):
            of_type = lists[target.dtype, source.dtype]
            of_type[0].append(target)
            of_type[1].append(source)
        else:
            target.copy_(source)
    for of_type in lists.values():
        torch._foreach_copy_(*of_type)


def _have_same_strides(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have equal strides in all dimensions larger than 1."""
    strides = one.stride(), other.stride()
    return strides[0] == strides[1] or all(
        size == 1 or stride == of_other
        for size, stride, of_other in zip(one.size(), *strides, strict=True)
    )
