"""Between the gradients of a CUDA rank and the arena: three streams, as in the paper's section 3.1.

The default stream computes. The D2H stream waits for an event that the gradient's hook records on
it, so that the host never waits for the device inside backward, and copies the chunk into the
arena, whose memory is pinned. The H2D stream copies the means back into the gradients, and the
default stream waits for its last event before the optimizer reads them.

Two threads stand where CUDA would call the host: one posts a chunk once its copy has arrived, the
other begins the copy back once the sum is there.
"""

import queue
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core.errors import WorkerLost
from paceline.core.plan import Kind
from paceline.exchange.layout import Chunk, Layout
from paceline.links.arena import Arena
from paceline.links.pinned import pin
from paceline.record.recorder import Recorder, noted
from paceline.strategies.host.transfer import changed_on_any

_Sent = tuple[Chunk, torch.cuda.Event]
_Awaited = tuple[int, Chunk, Recorder | None]


class CudaTransfer:
    """Moves gradients on streams of its own, beside the computation."""

    def __init__(self, arena: Arena, layout: Layout, deadline_s: float) -> None:
        self._arena, self._deadline_s = arena, deadline_s
        self._device = layout.slots[0].parameter.device
        self._to_host = torch.cuda.Stream(self._device)
        self._to_device = torch.cuda.Stream(self._device)
        self._pinned = [
            pin(arena.slot),
            pin(arena.shared_result(0)),
            pin(arena.shared_result(1)),
        ]
        self._own = {slot.index: slot.of(arena.slot) for slot in layout.slots}
        self._means = [
            {slot.index: slot.of(arena.shared_result(parity)) for slot in layout.slots}
            for parity in (0, 1)
        ]
        self._made: list[tuple[Tensor, Tensor]] = []
        self._left = self._num_sent = 0
        self._error: Exception | None = None
        self._sent: queue.SimpleQueue[_Sent | None] = queue.SimpleQueue()
        self._awaited: queue.SimpleQueue[_Awaited | None] = queue.SimpleQueue()
        self._posted: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._arrived: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=work, name=work.__name__, daemon=True)
            for work in (self._post, self._fetch)
        ]
        for thread in self._threads:
            thread.start()

    def begin(self, step: int, chunks: Sequence[Chunk], recorder: Recorder | None) -> None:
        """Have the chunks fetched as their sums appear."""
        self._made, self._left = [], len(chunks)
        for chunk in chunks:
            self._awaited.put((step, chunk, recorder))

    def send(self, chunk: Chunk, recorder: Recorder | None) -> None:
        """Queue the chunk's copies behind what the current stream has computed."""
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
                    gradient.record_stream(self._to_host)
        done = torch.cuda.Event(blocking=True)
        done.record(self._to_host)
        self._num_sent += 1
        self._sent.put((chunk, done))

    def arrive(self) -> None:
        """Wait until the copies have arrived on the host and are posted."""
        self._take(self._posted, self._num_sent)
        self._num_sent = 0
        self._raise_error()

    def receive(self, step: int) -> None:
        """Have the current stream wait for the means of all chunks."""
        self._arena.wait_step()
        self._join()
        self._raise_error()
        stream = torch.cuda.current_stream(self._device)
        stream.wait_stream(self._to_device)
        for parameter, gradient in self._made:
            gradient.record_stream(stream)
            parameter.grad = gradient

    def abandon(self) -> None:
        """Let the threads come to the end of a step that is void."""
        self._take(self._posted, self._num_sent)
        self._num_sent = 0
        self._join()
        self._error = None

    def _join(self) -> None:
        self._take(self._arrived, self._left)
        self._left = 0

    def _take(self, tokens: "queue.SimpleQueue[None]", count: int) -> None:
        """Take so many tokens from a thread, which has a deadline for its own waiting."""
        try:
            for _ in range(count):
                tokens.get(timeout=2 * self._deadline_s)
        except queue.Empty:
            raise WorkerLost(
                f"the GPU of this rank does not answer within {2 * self._deadline_s:g} s"
            ) from None

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """End the threads and unpin the memory."""
        self._sent.put(None)
        self._awaited.put(None)
        for thread in self._threads:
            thread.join()
        torch.cuda.synchronize(self._device)
        for unpin in self._pinned:
            unpin()

    def _post(self) -> None:
        """Post each chunk when its copy has arrived on the host."""
        while (item := self._sent.get()) is not None:
            chunk, done = item
            try:
                done.synchronize()
                self._arena.post(chunk.number)
            except Exception as error:
                self._error = error
            self._posted.put(None)

    def _fetch(self) -> None:
        """Begin to copy each chunk back when its sum is there."""
        torch.cuda.set_device(self._device)
        while (item := self._awaited.get()) is not None:
            step, chunk, recorder = item
            try:
                self._arena.wait_chunk(chunk.number)
                with (
                    torch.cuda.stream(self._to_device),
                    noted(recorder, Kind.H2D, str(chunk.number), alone=True),
                ):
                    self._copy_back(step, chunk)
            except Exception as error:
                self._error = error
            self._arrived.put(None)

    @torch.no_grad()
    def _copy_back(self, step: int, chunk: Chunk) -> None:
        changed = changed_on_any(self._arena, step)
        for slot in chunk.slots:
            if not changed[slot.index]:
                continue
            gradient = slot.parameter.grad
            if gradient is None:
                gradient = torch.empty_like(slot.parameter)
                self._made.append((slot.parameter, gradient))
            gradient.copy_(self._means[step % 2][slot.index], non_blocking=True)
            gradient.record_stream(self._to_device)
