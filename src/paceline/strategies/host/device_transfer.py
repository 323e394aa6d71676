"""Transfers between gradients on a GPU and the arena of its machine.

There are three streams, as in the paper's section 3.1, and a flat buffer on the device, in which
the gradients of a chunk lie as they do in the arena: one copy moves them all.

    compute     backward, gather 0 .. backward, gather 1 .. end of backward   wait, scatter, step
    to host               d2h 0 ................. d2h 1
    host                        post 0, sum 0 ...... post 1, sum 1
    to device                               h2d 0 .............. h2d 1

The stream that computes gathers a chunk in the hook of its last gradient; the host never waits for
the device inside backward. Gradients are only read until backward is over: then their means are
scattered from the buffer, also in the stream that computes, and before the optimizer.

Two threads stand where CUDA would call the host: one posts a chunk once it has arrived in the
arena, whose memory is pinned; the other begins the copy back once the sum is there.
"""

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
from paceline.record.recorder import Recorder, noted
from paceline.strategies.host.transfer import ExchangeTimes, changed_on_any


class _StepTimes(NamedTuple):
    """Events of a step: when backward ended, and when the means had reached the gradients.

    Of each chunk's gathering and exchange, on its way to the host and back, begin and end.
    """

    backward_end: Event
    end: Event
    gathers: list[tuple[Event, Event]]
    exchanges: list[tuple[Event, Event]]

    def exposed_s(self) -> float:
        """Return the seconds in which the device exchanged in place of computing."""
        gathering_s = sum(end.seconds_after(begin) for begin, end in self.gathers)
        return gathering_s + self.end.seconds_after(self.backward_end)

    def hidden_s(self) -> float:
        """Return the seconds in which chunks were on their way while backward went on."""
        first = self.exchanges[0][0]
        end_s = self.backward_end.seconds_after(first)
        spans = [(a.seconds_after(first), b.seconds_after(first)) for a, b in self.exchanges]
        return _covered(((begin, min(end, end_s)) for begin, end in spans))


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of what lies in any of the spans."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


class DeviceTransfer:
    """Moves gradients on streams of its own, beside the computation.

    The arena's memory is pinned as long as it is used here.
    """

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
        self._free = self._device.current_stream().record()  # the buffer: nothing is in it
        # They go on after a step that is discarded.
        self._poster = CallThread("post", goes_on=True)
        self._fetcher = CallThread("fetch", goes_on=True)
        self._posted: list[Future[None]] = []
        self._fetched: list[Future[None]] = []
        self._gathers: list[tuple[Event, Event]] = []
        self._begun: dict[int, Event] = {}  # by chunk: its way to the host
        self._ended: dict[int, Event] = {}  # and its way back
        self._latest: _StepTimes | None = None

    def begin(self, step: int, chunks: Sequence[Chunk], recorder: Recorder | None) -> None:
        """Have a thread copy the chunks back as their sums appear."""
        self._gathers, self._begun, self._ended, self._fetched = [], {}, {}, []
        for chunk in chunks:
            self._fetched.append(self._fetcher.submit(partial(self._fetch, step, chunk, recorder)))

    def send(self, chunk: Chunk, recorder: Recorder | None) -> None:
        """Queue the chunk's way to the host behind what the current stream has computed."""
        computing = self._device.current_stream()
        # The means of the step before have left the buffer, maybe in another stream than this.
        computing.wait(self._free)
        begin = computing.record(timed=True)
        with recorder.pause() if recorder is not None else nullcontext():
            self._gather(chunk)
        gathered = computing.record(timed=True)
        self._gathers.append((begin, gathered))
        # An event at this place: kernels that are queued later are not waited for.
        self._to_host.wait(gathered)
        with self._device.use(self._to_host):
            self._begun[chunk.number] = self._to_host.record(timed=True)
            with noted(recorder, Kind.D2H, str(chunk.number), alone=True):
                bytes_of(chunk, self._arena.slot).copy_(
                    bytes_of(chunk, self._buffer), non_blocking=True
                )
            arrived = self._to_host.record()
        self._posted.append(self._poster.submit(partial(self._post, chunk, arrived)))

    @torch.no_grad()
    def _gather(self, chunk: Chunk) -> None:
        """Copy gradients of any layout into the buffer; one that is missing counts as zero."""
        parts, gradients = list[Tensor](), list[Tensor]()
        for slot in chunk.slots:
            if slot.parameter.grad is None:
                self._parts[slot.index].zero_()
            else:
                parts.append(self._parts[slot.index])
                gradients.append(slot.parameter.grad)
        if parts:
            torch._foreach_copy_(parts, gradients)

    def arrive(self) -> None:
        """Wait until all chunks have arrived on the host and are posted."""
        self._backward_end = self._device.current_stream().record(timed=True)
        if error := self._join(self._posted):
            raise error

    def receive(self, step: int) -> None:
        """Make each gradient that changed anywhere its mean, once the device has the means.

        The host goes on meanwhile, and queues the optimizer's step.
        """
        # The thread first: it waits for chunks, which it may not once the step is over.
        if error := self._join(self._fetched):
            raise error
        self._arena.wait_step()
        computing = self._device.current_stream()
        computing.wait_stream(self._to_device)
        self._scatter(changed_on_any(self._arena, step))
        self._count_latest()  # all events of the step before are reached: this one came after it
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
        if parts:
            torch._foreach_copy_(gradients, parts)

    def took(self, exposed_s: float = 0.0, hidden_s: float = 0.0) -> None:
        """Do nothing: the host's clock, which runs ahead of the device, says nothing of it."""

    def count_times(self) -> None:
        """Count the times of the latest step, once the device is done with it."""
        if self._latest is not None:
            self._latest.end.synchronize()
        self._count_latest()

    def _count_latest(self) -> None:
        if self._latest is not None:
            self._times.add(self._latest.exposed_s(), self._latest.hidden_s())
        self._latest = None

    def abandon(self) -> None:
        """Wait until neither threads nor copies work on a discarded step."""
        self._join(self._posted)
        self._join(self._fetched)
        # A mean that is on its way back must not meet the next step's gradients in the buffer. On
        # the way to the host there is nothing: the thread that posts has waited for it.
        self._to_device.synchronize()

    def _join(self, calls: list[Future[None]]) -> BaseException | None:
        """Wait for calls, whose own waits have half of this deadline; return the first error."""
        try:
            errors = [call.exception(2 * self._deadline_s) for call in calls]
        except TimeoutError:
            raise WorkerLost(
                f"the GPU of this rank does not answer within {2 * self._deadline_s:g} s"
            ) from None
        calls.clear()
        return next((error for error in errors if error is not None), None)

    def close(self) -> None:
        """End the threads, wait until no copy uses the arena, and release its memory."""
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


def bytes_of(chunk: Chunk, memory: Tensor) -> Tensor:
    """Return a chunk's part of memory that has the arena's layout, uint8."""
    first, last = chunk.slots[0], chunk.slots[-1]
    return memory[first.offset : last.offset + last.nbytes]
