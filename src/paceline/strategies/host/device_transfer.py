"""Copy gradients between a GPU and the arena, the shared memory of a machine's ranks.

The copies use three streams (Le et al. 2018, section 3.1) and a flat buffer on the GPU. The buffer
has the same layout as the arena, so one copy moves all gradients of a chunk.

    compute     backward, gather 0 .. backward, gather 1 .. end of backward   wait, scatter, step
    to host               d2h 0 ................. d2h 1
    host                        post 0, sum 0 ...... post 1, sum 1
    to device                               h2d 0 .............. h2d 1

In the backward hook of a chunk's last gradient, the compute stream gathers the chunk's gradients
into the buffer. The host does not wait for the GPU during backward. After backward, the compute
stream scatters the means from the buffer to the gradients before the optimizer runs.

Two threads replace CUDA's callbacks to the host. The first thread posts a chunk after its copy to
the arena's pinned memory. The second thread starts the copy back after the sum.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.core.errors import WorkerLost
from paceline.core.plan import Kind
from paceline.exchange.layout import Chunk, Layout
from paceline.links.arena import Arena
from paceline.links.call_thread import CallThread
from paceline.links.devices import Event, device_of
from paceline.record.recorder import Recorder, Role, noted
from paceline.strategies.host.transfer import ExchangeTimes, changed_on_any


class _StepTimes(NamedTuple):
    """The events of a step on the GPU's streams.

    `end`: after the copy of the means to the gradients. `gathers`: before and after each chunk's
    gathering. `exchanges`: after each chunk's gathering, and after the chunk's copy back.
    """

    backward_end: Event
    end: Event
    gathers: list[tuple[Event, Event]]
    exchanges: list[tuple[Event, Event]]

    def exposed_s(self) -> float:
        """Return the seconds that the exchange adds to the step.

        Adds the seconds of gathering and the seconds from the end of backward to `end`.
        """
        gathering_s = sum(end.seconds_after(begin) for begin, end in self.gathers)
        return gathering_s + self.end.seconds_after(self.backward_end)

    def hidden_s(self) -> float:
        """Return the seconds during backward in which a chunk was exchanged."""
        first = self.exchanges[0][0]
        end_s = self.backward_end.seconds_after(first)
        spans = [(a.seconds_after(first), b.seconds_after(first)) for a, b in self.exchanges]
        return _covered(((begin, min(end, end_s)) for begin, end in spans))


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of spans."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


class DeviceTransfer:
    """Copies a GPU's gradients to pinned memory of the arena, and the means back."""

    def __init__(
        self, arena: Arena, layout: Layout, times: ExchangeTimes, deadline_s: float
    ) -> None:
        self._arena, self._layout, self._times = arena, layout, times
        self._deadline_s = deadline_s
        self._device = device_of(layout.slots[0].parameter.device)
        self._to_host, self._to_device = self._device.new_stream(), self._device.new_stream()
        self._results = [arena.shared_result(parity) for parity in (0, 1)]
        self._buffer = torch.empty(
            layout.nbytes, dtype=torch.uint8, device=self._device.torch_device
        )
        self._parts = {slot.index: slot.of(self._buffer) for slot in layout.slots}
        # The buffer may be overwritten after this event.
        self._free = self._device.current_stream().record()
        # After an error, as in a discarded step, the threads accept further calls.
        self._poster = CallThread("post", goes_on=True)
        self._fetcher = CallThread("fetch", goes_on=True)
        self._posted: list[Future[None]] = []
        self._fetched: list[Future[None]] = []
        self._gathers: list[tuple[Event, Event]] = []
        self._begun: dict[int, Event] = {}  # begin of exchanges, by chunk
        self._ended: dict[int, Event] = {}  # end of copies back, by chunk
        self._latest: _StepTimes | None = None

    def begin(self, step: int, chunks: Sequence[Chunk], recorder: Recorder | None) -> None:
        """Begin a step: a thread will copy each chunk back when its sum is ready."""
        self._gathers, self._begun, self._ended, self._fetched = [], {}, {}, []
        for chunk in chunks:
            self._fetched.append(self._fetcher.submit(partial(self._fetch, step, chunk, recorder)))

    def send(self, chunk: Chunk, recorder: Recorder | None) -> None:
        """Queue a chunk's copy to the host after the work of the current stream."""
        computing = self._device.current_stream()
        # If another stream scattered the means of the previous step, it may still read the buffer.
        computing.wait(self._free)
        begin = computing.record(timed=True)
        with recorder.recorded(Role.PAUSE, Kind.D2H) if recorder is not None else nullcontext():
            self._gather(chunk)
        gathered = computing.record(timed=True)
        self._gathers.append((begin, gathered))
        # The exchange begins here, so it includes a wait for the copy of an earlier chunk.
        self._begun[chunk.number] = gathered
        # Wait for this event, because the compute stream may already have later kernels.
        self._to_host.wait(gathered)
        with self._device.use(self._to_host):
            with noted(recorder, Kind.D2H, str(chunk.number), alone=True):
                bytes_of(chunk, self._arena.slot).copy_(
                    bytes_of(chunk, self._buffer), non_blocking=True
                )
            arrived = self._to_host.record()
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
        self._backward_end = self._device.current_stream().record(timed=True)
        if error := self._join(self._posted):
            raise error

    def receive(self, step: int) -> None:
        """Replace gradients that changed on any rank by their means.

        The copies are queued on the compute stream. The host does not wait for them, so it can
        queue the optimizer's kernels.
        """
        # Wait for the fetching thread first: it must not wait for chunks after the step has ended.
        if error := self._join(self._fetched):
            raise error
        self._arena.wait_step()
        computing = self._device.current_stream()
        computing.wait_stream(self._to_device)
        self._scatter(changed_on_any(self._arena, step))
        self._count_latest()  # the GPU has reached all events of the previous step
        self._free = computing.record(timed=True)
        exchanges = [(self._begun[number], self._ended[number]) for number in self._begun]
        self._latest = _StepTimes(self._backward_end, self._free, self._gathers, exchanges)

    @torch.no_grad()
    def _scatter(self, changed: Sequence[int]) -> None:
        gradients, parts = list[Tensor](), list[Tensor]()
        for slot in self._layout.slots:
            if not changed[slot.index]:
                continue
            if slot.parameter.grad is None:
                slot.parameter.grad = torch.empty_like(slot.parameter)
            gradients.append(slot.parameter.grad)
            parts.append(self._parts[slot.index])
        copy_all(gradients, parts)

    def took(self, exposed_s: float = 0.0, hidden_s: float = 0.0) -> None:
        """Do nothing: the host runs ahead of the GPU, so GPU events measure the times."""

    def count_times(self) -> None:
        """Wait until the GPU has completed the latest step, and count the step's times."""
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
        # Copies back must end, because they would overwrite the next step's gradients in the
        # buffer. Copies to the host have ended, because the posting thread waited for them.
        self._to_device.synchronize()

    def _join(self, calls: list[Future[None]]) -> BaseException | None:
        """Wait for calls of a thread, and return their first error.

        Waits twice the deadline for each call, because the call itself may wait for one deadline.
        """
        try:
            errors = [call.exception(2 * self._deadline_s) for call in calls]
        except TimeoutError:
            raise WorkerLost(
                f"this rank's GPU did not respond within {2 * self._deadline_s:g} s"
            ) from None
        calls.clear()
        return next((error for error in errors if error is not None), None)

    def close(self) -> None:
        """End the threads and all copies, and release the arena's memory."""
        self._poster.close(None)
        self._fetcher.close(None)
        self.count_times()
        self._device.synchronize()
        self._results = []

    def _post(self, chunk: Chunk, arrived: Event) -> None:
        with self._device.use():
            arrived.synchronize()
        self._arena.post(chunk.number)

    def _fetch(self, step: int, chunk: Chunk, recorder: Recorder | None) -> None:
        self._arena.wait_chunk(chunk.number)
        with self._device.use(self._to_device):
            with noted(recorder, Kind.H2D, str(chunk.number), alone=True):
                bytes_of(chunk, self._buffer).copy_(
                    bytes_of(chunk, self._results[step % 2]), non_blocking=True
                )
            self._ended[chunk.number] = self._to_device.record(timed=True)


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors with few kernels.

    `_foreach_copy_` uses a kernel per tensor if the dtypes or strides in its lists differ. So it is
    called once per pair of dtypes, and tensors with different strides are copied separately.
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


def bytes_of(chunk: Chunk, memory: Tensor) -> Tensor:
    """Return the bytes of a chunk as a part of `memory`, which has the arena's layout."""
    first, last = chunk.slots[0], chunk.slots[-1]
    return memory[first.offset : last.offset + last.nbytes]
