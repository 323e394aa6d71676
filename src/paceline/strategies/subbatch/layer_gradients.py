"""Average gradients layer by layer, with a thread that waits for the exchanges.

main thread             [encode, post 0][encode, post 1][compute ...        ]
communication thread                    [wait, decode 0][wait, decode 1]
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.codecs.gathering import Pending
from paceline.core.errors import InvalidInput, NonFinite
from paceline.core.plan import Kind
from paceline.exchange.compressed import CodecAllReduce
from paceline.exchange.layout import Chunk, Layout
from paceline.exchange.replica import Exchange, Statistics
from paceline.links.call_thread import CallThread, finish_stream
from paceline.links.group import Group
from paceline.links.rendezvous import leave


class CommunicationThread:
    """Completes exchanges in order, in parallel with computation.

    All ranks must create it together, and begin their exchanges in the same order. The
    thread waits for each exchange at most the group's deadline. If one fails, all later ones fail.
    `is_synchronous`: whether `begin` waits until its exchange ends, as profiles require.
    """

    def __init__(self, group: Group) -> None:
        self._device = group.device
        # A separate process group, so that no other collective receives this thread's messages.
        self.process_group: dist.ProcessGroup | None = None
        self.is_synchronous = False
        self._thread: CallThread | None = None
        if group.world_size == 1:
            return
        self.process_group = dist.new_group(
            timeout=timedelta(seconds=group.deadline_s),
            backend="gloo" if group.device.type == "cpu" else None,
        )
        self._thread = CallThread("paceline", group.device)

    def begin(
        self,
        post: Callable[[], Pending],
        on_done: Callable[[float, float], None] = lambda *_: None,
    ) -> Future[Tensor]:
        """Start an exchange by calling `post`, and return a future of the exchanged values.

        Before the future has its result, the thread calls `on_done(begin_s, end_s)` with the
        monotonic times at which the exchange began and ended. With a single rank, `on_done` is not
        called.
        """
        started = time.monotonic()
        begun = post()
        if self._thread is None:
            future: Future[Tensor] = Future()
            future.set_result(begun.wait())
            return future
        future = self._thread.submit(partial(self._finish, begun, started, on_done))
        if self.is_synchronous:
            future.exception()  # only wait here: the future will raise an error in the caller
        return future

    def close(self) -> None:
        """End the thread after its exchanges; abandon the thread if it waits for a lost rank."""
        if self._thread is not None and self.process_group is not None and self._thread.close():
            leave(self.process_group)
        self._thread = None

    def _finish(
        self, begun: Pending, started_s: float, on_done: Callable[[float, float], None]
    ) -> Tensor:
        values = begun.wait()
        finish_stream(self._device)
        on_done(started_s, time.monotonic())
        return values


def begin_sum(values: Tensor, group: dist.ProcessGroup | None) -> Pending:
    """Start an all-reduce that sums `values` over all ranks in place."""
    work = dist.all_reduce(values, group=group, async_op=True)
    assert work is not None  # None only on a rank outside `group`

    def summed() -> Tensor:
        work.wait()
        return values

    return Pending(summed)


class LayerGradients(Exchange):
    """Averages gradients layer by layer during backward.

    `thread`: the thread that all exchanges of the strategy use. Without a codec, a layer's message
    also has one flag per gradient: 1 if this rank changed the gradient. A gradient that no rank
    changed is not modified. With a codec, there are no flags, and all gradients are averaged.
    """

    def __init__(self, thread: CommunicationThread, group: Group, codec: str | None) -> None:
        self._thread, self._group = thread, group
        self._running: list[tuple[Chunk, Future[Tensor]]] = []
        self._postponed: list[Chunk] = []
        self._num_steps = self._nbytes = 0
        if codec is not None:
            ranks = range(group.world_size)
            self.encoded = CodecAllReduce(codec, ranks, group.device, group.deadline_s)

    def open(self, layout: Layout) -> None:
        """Check the parameters' dtypes.

        Raises InvalidInput unless all have the same real dtype, which must be float32 for codecs.
        """
        kinds = list(dict.fromkeys(slot.parameter.dtype for slot in layout.slots))
        encodable = self.encoded is None or kinds[0] == torch.float32
        if len(kinds) > 1 or kinds[0].is_complex or not encodable:
            wanted = "be float32 to use a codec" if self.encoded else "all have one real dtype"
            raise InvalidInput("parameters", f"must {wanted}", got=list(map(str, kinds)))

    def begin(self) -> None:
        """Begin a step."""
        self._running, self._postponed = [], []
        if self.encoded is not None:
            self.encoded.begin_step()

    def ready(self, chunk: Chunk, touched: Sequence[bool]) -> None:
        """Start averaging a layer's gradients.

        If the thread is synchronous, `finish` does this after backward instead.
        """
        if self._thread.is_synchronous:
            self._postponed.append(chunk)
        else:
            self._begin(chunk, touched)

    def _begin(self, chunk: Chunk, touched: Sequence[bool]) -> None:
        layer, recorder = chunk.slots[0].layer, self.recorder
        gradients = [
            torch.zeros_like(parameter).flatten()
            if parameter.grad is None
            else parameter.grad.detach().reshape(-1)
            for parameter in (slot.parameter for slot in chunk.slots)
        ]
        if self.encoded is None:
            changed = [float(touched[slot.index]) for slot in chunk.slots]
            values = torch.cat([*gradients, gradients[0].new_tensor(changed)])
            self._nbytes += 2 * (self._group.world_size - 1) * values.nbytes
            post = partial(begin_sum, values, self._thread.process_group)
        else:
            post = partial(self._begin_encoded, self.encoded, layer, torch.cat(gradients))
        joined = recorder.begin(Kind.REDUCE, layer) if recorder else None

        def on_done(*_: float) -> None:
            if recorder is not None:
                recorder.end(joined)

        self._running.append((chunk, self._thread.begin(post, on_done)))

    def _begin_encoded(self, encoded: CodecAllReduce, layer: str, values: Tensor) -> Pending:
        """Start to average values with the codec; `wait` on the result returns the means.

        If any rank has a non-finite value, `wait` raises NonFinite on all ranks.
        """
        work = encoded.reduce(layer, values, self._group.world_size)

        def finish() -> Tensor:
            means = work.future.wait()
            if work.num_nonfinite:
                raise NonFinite(
                    f"gradients of layer {layer!r} have {work.num_nonfinite} NaN or infinite "
                    "values, which codecs cannot represent"
                )
            return means

        return Pending(finish)

    @torch.no_grad()
    def finish(self, touched: Sequence[bool]) -> Sequence[bool]:
        """Wait for all means, load them into the gradients, and return which gradients changed."""
        anywhere = [False] * len(touched)
        for chunk in self._postponed:
            self._begin(chunk, touched)
        for chunk, future in self._running:
            sizes = [slot.parameter.numel() for slot in chunk.slots]
            found = future.result()
            changed = [1.0] * len(sizes)
            if self.encoded is None:
                changed = found[sum(sizes) :].tolist()
                found = found[: sum(sizes)].div_(self._group.world_size)
            for slot, mean, times in zip(chunk.slots, found.split(sizes), changed, strict=True):
                if not times:
                    continue
                gradient = slot.parameter.grad
                if gradient is None:
                    gradient = slot.parameter.grad = torch.empty_like(slot.parameter)
                gradient.copy_(mean.view(gradient.shape))
                anywhere[slot.index] = True
        self._running, self._postponed = [], []
        self._num_steps += 1
        return anywhere

    def discard(self) -> None:
        """Raise InvalidInput, because the other ranks already wait for this rank's gradients."""
        problem = "subbatch cannot discard a step, but backward failed on this rank"
        raise InvalidInput("strategy", problem)

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent; without a codec, calculated for a ring all-reduce."""
        encoded = self.encoded.bytes_sent if self.encoded else 0
        return encoded + self._nbytes // self._group.world_size

    def statistics(self) -> Statistics:
        """Return the number of steps and the traffic so far."""
        sent = self.bytes_sent
        share = self.encoded.codecs.sent_share if self.encoded else None
        return Statistics("subbatch", self._num_steps, sent, sent, None, None, sent_share=share)

    def close(self) -> None:
        """Close the compressed all-reduce."""
        if self.encoded is not None:
            self.encoded.close()
