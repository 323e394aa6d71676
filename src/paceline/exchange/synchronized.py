"""A replica whose gradients become, during backward, the mean over all ranks."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from paceline.core.errors import InvalidInput, StepDiscarded
from paceline.core.plan import Kind
from paceline.exchange.agreement import agreed_order, check_same, trainable
from paceline.exchange.layout import Chunk, Layout
from paceline.exchange.readiness import Readiness, in_backward
from paceline.exchange.replica import Statistics
from paceline.links.group import Group
from paceline.record.recorder import Recorder
from paceline.tune.chunk import ChunkTuner


class Exchange(Protocol):
    """How gradients become their mean. All ranks call everything but `ready` in the same order.

    `touched` says of each parameter whether its gradient has changed on this rank; one that has
    changed on no rank stays as it is on all.
    """

    name: str
    chunked: bool
    recorder: Recorder | None

    def open(self, layout: Layout) -> None:
        """Learn where the gradients lie."""
        ...

    def set_chunks(self, chunks: Sequence[Chunk]) -> None:
        """Exchange these together from the next step on."""
        ...

    def begin(self) -> None:
        """Begin a step."""
        ...

    def ready(self, chunk: Chunk, touched: Sequence[bool]) -> None:
        """Begin to exchange the chunk: this rank's part of it is there."""
        ...

    def finish(self, touched: Sequence[bool]) -> None:
        """Return when every gradient is the mean over all ranks."""
        ...

    def before_forward(self) -> None:
        """Do what has to be done before the next forward pass."""
        ...

    def before_backward(self, touched: Sequence[bool]) -> None:
        """Do what has to be done before gradients accumulate."""
        ...

    def discard(self) -> None:
        """Give up the step that has begun: this rank's backward pass has failed."""
        ...

    def statistics(self) -> Statistics:
        """Return what it has taken so far."""
        ...

    def close(self) -> None:
        """Give back what is held."""
        ...


class Synchronized:
    """Runs `module`, and exchanges its gradients while backward goes on.

    All ranks must have the same model: InvalidInput names the first difference. Parameters and
    buffers become those of rank 0; later its buffers are sent before each forward pass in training,
    as DistributedDataParallel does. The first backward pass is exchanged as a whole, after it is
    over, and shows in which order gradients become ready. `chunk` is a number of layers, or a tuner
    that looks for it while training goes on: rank 0's times decide, for all.
    """

    def __init__(
        self, module: nn.Module, exchange: Exchange, group: Group, chunk: int | ChunkTuner = 1
    ) -> None:
        self._module, self._exchange, self._group = module, exchange, group
        self._named = trainable(module, group.device)
        self._frozen = [p for p in module.parameters() if not p.requires_grad]
        check_same(self._named, group)
        group.broadcast([*_data(module.parameters()), *_data(module.buffers())])
        self._tuner = None if isinstance(chunk, int) else chunk
        self._chunk = chunk if isinstance(chunk, int) else chunk.chunk
        self._layout: Layout | None = None
        self._chunks: tuple[Chunk, ...] = ()
        self._step_end: float | None = None
        self._num_recorded = 0
        self._began_phase = False
        self._readiness = Readiness([(name, p) for _, name, p in self._named], self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward pass."""
        if self._readiness.interrupted:
            self._discard()
        if self._module.training and torch.is_grad_enabled() and not in_backward():
            self._exchange.before_forward()
            if not self._readiness.paused:
                self._send_buffers()
        outputs = self._module(*args, **kwargs)
        if torch.is_grad_enabled():
            self._readiness.watch(outputs)
        return outputs

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it gradients accumulate on this rank alone; the next exchange sends their sum."""
        before, self._readiness.paused = self._readiness.paused, True
        try:
            yield
        finally:
            self._readiness.paused = before

    def record(self, recorder: Recorder | None) -> None:
        """Tell the recorder of all exchanges from now on; None ends that."""
        self._exchange.recorder = recorder

    def statistics(self) -> Statistics:
        """Return what exchanging has taken so far."""
        return self._exchange.statistics()

    def close(self) -> None:
        """Remove all hooks and give back what the exchange holds."""
        self._readiness.close()
        self._exchange.close()

    # What Readiness tells.

    def approaching(self) -> None:
        """Prepare for a backward pass that has reached the outputs, and no parameter yet."""
        recorder = self._exchange.recorder
        if recorder is not None and recorder.idle:  # in a loop that is not ours
            recorder.begin_phase(Kind.BACKWARD)
            self._began_phase = True
        self._exchange.before_backward(self._readiness.touched)

    def began(self) -> None:
        """Begin a step: the first gradient of a backward pass is ready."""
        if self._layout is not None:
            self._exchange.begin()

    def ready(self, chunk: int) -> None:
        """Hand a chunk over: all its gradients are ready."""
        self._exchange.ready(self._chunks[chunk], self._readiness.touched)

    def ended(self, missing: Sequence[int]) -> None:
        """Exchange what is missing, and wait for all."""
        if self._began_phase and self._exchange.recorder is not None:
            self._exchange.recorder.end_phase()
            self._began_phase = False
        self._check_frozen()
        if self._layout is None:
            self._agree()
            self._exchange.begin()
            missing = range(len(self._chunks))
        for number in missing:
            self._exchange.ready(self._chunks[number], self._readiness.touched)
        try:
            self._exchange.finish(self._readiness.touched)
        except StepDiscarded:
            self._forget_gradients()
            raise
        if self._tuner is not None:
            self._tune(self._tuner)

    def _agree(self) -> None:
        order = agreed_order(self._readiness.order, len(self._named), self._group)
        if order is None:
            self._forget_gradients()
            raise StepDiscarded(
                "the first backward pass failed on another rank: its gradients are discarded on all"
            )
        self._layout = Layout.of(self._named, order)
        self._exchange.open(self._layout)
        self._set_chunk(self._chunk)

    def _set_chunk(self, size: int) -> None:
        assert self._layout is not None
        self._chunk = size
        whole = (Chunk(0, self._layout.slots),)
        self._chunks = self._layout.chunks(size) if self._exchange.chunked else whole
        chunk_of = [0] * len(self._named)
        for chunk in self._chunks:
            for slot in chunk.slots:
                chunk_of[slot.index] = chunk.number
        self._exchange.set_chunks(self._chunks)
        self._readiness.expect(chunk_of)

    def _tune(self, tuner: ChunkTuner) -> None:
        now, before = time.monotonic(), self._step_end
        self._step_end = now
        if before is None:
            return
        if self._group.rank == 0:
            tuner.record(now - before)
        self._num_recorded += 1
        if self._num_recorded % tuner.interval == 0:
            agreed, done = self._group.gather([tuner.chunk, tuner.done])[0]
            if agreed != self._chunk:
                self._set_chunk(agreed)
            if done:
                self._tuner = None
            self._step_end = time.monotonic()

    def _discard(self) -> None:
        self._readiness.clear()
        self._forget_gradients()
        if self._layout is None:
            agreed_order(None, len(self._named), self._group)
        else:
            self._exchange.discard()

    def _forget_gradients(self) -> None:
        """Keep gradients of this rank alone from updating what all have in common."""
        for _, _, parameter in self._named:
            parameter.grad = None

    def _check_frozen(self) -> None:
        if any(parameter.requires_grad for parameter in self._frozen):
            names = [n for n, p in self._module.named_parameters() if p.requires_grad]
            known = {name for _, name, _ in self._named}
            new = next(name for name in names if name not in known)
            raise InvalidInput(
                f"parameter {new!r}: was frozen when the module was made parallel, and is not any "
                "more; make the module parallel again after changing requires_grad"
            )

    def _send_buffers(self) -> None:
        buffers = _data(self._module.buffers())
        if buffers:
            self._group.broadcast_together(buffers)


def _data(tensors: Any) -> list[Tensor]:
    return [tensor.detach() for tensor in tensors]
