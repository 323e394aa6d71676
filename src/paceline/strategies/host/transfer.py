"""Transfers between the gradients of a rank's device and the arena of its machine.

On CUDA there are three streams, as in the paper's section 3.1. The default stream computes. The D2H
stream waits for an event that the gradient's hook records on it, so that the host never waits for
the device inside backward, and copies the chunk into the arena, whose memory is pinned. The H2D
stream copies the means back into the gradients, and the default stream waits for its last event
before the optimizer reads them.

Two threads stand where CUDA would call the host: one posts a chunk once its copy has arrived, the
other begins the copy back once the sum is there.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

import torch
from torch import Tensor

from paceline.core.errors import WorkerLost
from paceline.core.plan import Kind
from paceline.exchange.layout import Chunk, Layout, Slot
from paceline.links.arena import Arena
from paceline.links.shared_memory import pin
from paceline.record.recorder import Recorder, noted


def changed_on_any(arena: Arena, step: int) -> list[int]:
    """Return for each parameter 1 if its gradient has changed on any rank, else 0."""
    changed: list[int] = arena.flags.numpy()[:, :, step % 2].max(0).tolist()
    return changed


class CpuTransfer:
    """Copies gradients into the arena, and means back into the gradients.

    With `as_views` a parameter's gradient is a view of the result instead, which saves that copy.
    The view is copy-on-write, so that gradients may be changed in place. Where they are (as by
    clipping), the page faults of that cost more than a copy does: then means are copied out.
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
        """Do nothing: `receive` waits for the sums of all chunks together."""

    def send(self, chunk: Chunk, recorder: Recorder | None) -> None:
        """Copy the chunk's gradients into this rank's slot and post it."""
        # `noted` would take as long as the copy of a small chunk.
        name = str(chunk.number)
        copying = recorder.join_exchange(name, Kind.D2H, alone=True) if recorder else None
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
            recorder.leave_exchange(copying)
        self._arena.post(chunk.number)

    def arrive(self) -> None:
        """Do nothing: `send` has posted its chunk."""

    @torch.no_grad()
    def receive(self, step: int) -> None:
        """Wait for the step and make every gradient that changed anywhere its mean."""
        self._arena.wait_step()
        # A page was written in place, as by clipping: from now on copying is cheaper.
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
        """Do nothing: no thread works on a discarded step."""

    def _copy_out(self, slot: Slot, step: int) -> None:
        gradient = slot.parameter.grad
        if gradient is None or gradient.stride() != slot.stride or self._is_view(gradient, slot):
            # A view of the arena would be overwritten by a later step.
            gradient = slot.parameter.grad = torch.empty_like(slot.parameter)
        self._arena.copy_out(step, slot.offset, gradient)

    def _clone_if_view(self, slot: Slot) -> None:
        """Clone a gradient that is a view: the step after the next overwrites it."""
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


class SerialThread:
    """A thread that runs calls one after another.

    It is a daemon, unlike an executor's: one that waits for a lost rank must not keep the process.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[None], Callable[[], None]] | None]
        self._calls = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], None]) -> Future[None]:
        """Run the call after those before it, whether or not these failed."""
        future: Future[None] = Future()
        self._calls.put((future, call))
        return future

    def close(self) -> None:
        """End the thread after the calls that it has."""
        self._calls.put(None)
        self._thread.join()

    def _run(self) -> None:
        for future, call in iter(self._calls.get, None):
            try:
                call()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(None)


class CudaTransfer:
    """Moves gradients on streams of its own, beside the computation."""

    def __init__(self, arena: Arena, layout: Layout, deadline_s: float) -> None:
        self._arena, self._deadline_s = arena, deadline_s
        self._device = layout.slots[0].parameter.device
        self._to_host = torch.cuda.Stream(self._device)
        self._to_device = torch.cuda.Stream(self._device)
        memory = (arena.slot, arena.shared_result(0), arena.shared_result(1))
        self._pinned = [pin(tensor) for tensor in memory]
        self._own = {slot.index: slot.of(arena.slot) for slot in layout.slots}
        self._means = [
            {slot.index: slot.of(arena.shared_result(parity)) for slot in layout.slots}
            for parity in (0, 1)
        ]
        self._made: list[tuple[Tensor, Tensor]] = []
        self._poster, self._fetcher = SerialThread("post"), SerialThread("fetch")
        # The current device belongs to a thread.
        self._fetcher.submit(partial(torch.cuda.set_device, self._device))
        self._posted: list[Future[None]] = []
        self._fetched: list[Future[None]] = []

    def begin(self, step: int, chunks: Sequence[Chunk], recorder: Recorder | None) -> None:
        """Have a thread copy the chunks back as their sums appear."""
        self._made, self._fetched = [], []
        for chunk in chunks:
            self._fetched.append(self._fetcher.submit(partial(self._fetch, step, chunk, recorder)))

    def send(self, chunk: Chunk, recorder: Recorder | None) -> None:
        """Queue the chunk's copies behind what the current stream has computed."""
        # An event at this place of the stream: kernels that are queued later are not waited for.
        self._to_host.wait_stream(torch.cuda.current_stream(self._device))
        with (
            torch.cuda.stream(self._to_host),
            noted(recorder, Kind.D2H, str(chunk.number), alone=True),
        ):
            for slot in chunk.slots:
                gradient = slot.parameter.grad
                if gradient is None:
                    self._own[slot.index].zero_()
                else:
                    self._own[slot.index].copy_(gradient, non_blocking=True)
                    # The caching allocator must not reuse the memory before this copy is done.
                    gradient.record_stream(self._to_host)
        done = torch.cuda.Event(blocking=True)  # the waiting thread sleeps: spinning needs a core
        done.record(self._to_host)
        self._posted.append(self._poster.submit(partial(self._post, chunk, done)))

    def arrive(self) -> None:
        """Wait until the copies have arrived on the host and are posted."""
        if error := self._join(self._posted):
            raise error

    def receive(self, step: int) -> None:
        """Make the current stream wait for the means of all chunks."""
        # The thread first: it waits for chunks, which it may not once the step is over.
        if error := self._join(self._fetched):
            raise error
        self._arena.wait_step()
        stream = torch.cuda.current_stream(self._device)
        # On the GPU alone: the host goes on and queues the optimizer's step.
        stream.wait_stream(self._to_device)
        for parameter, gradient in self._made:
            gradient.record_stream(stream)
            parameter.grad = gradient

    def abandon(self) -> None:
        """Wait until the threads have finished a discarded step."""
        self._join(self._posted)
        self._join(self._fetched)

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
        """End the threads and unpin the memory."""
        self._poster.close()
        self._fetcher.close()
        torch.cuda.synchronize(self._device)  # copies may still use the pinned memory
        for unpin in self._pinned:
            unpin()

    def _post(self, chunk: Chunk, done: torch.cuda.Event) -> None:
        done.synchronize()
        self._arena.post(chunk.number)

    @torch.no_grad()
    def _fetch(self, step: int, chunk: Chunk, recorder: Recorder | None) -> None:
        self._arena.wait_chunk(chunk.number)
        changed = changed_on_any(self._arena, step)
        with (
            torch.cuda.stream(self._to_device),
            noted(recorder, Kind.H2D, str(chunk.number), alone=True),
        ):
            for slot in chunk.slots:
                if not changed[slot.index]:
                    continue
                gradient = slot.parameter.grad
                if gradient is None:
                    # This thread must not assign `grad`: backward may still run. `receive` does.
                    gradient = torch.empty_like(slot.parameter)
                    self._made.append((slot.parameter, gradient))
                gradient.copy_(self._means[step % 2][slot.index], non_blocking=True)
                gradient.record_stream(self._to_device)
