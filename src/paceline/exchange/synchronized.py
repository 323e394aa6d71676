"""A replica whose gradients become, during backward, the mean over all ranks."""

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from paceline.core.errors import InvalidInput, StepDiscarded
from paceline.core.plan import Kind
from paceline.exchange.agreement import agreed_order, check_frozen, check_same, trainable
from paceline.exchange.layout import Chunk, Layout, Slot
from paceline.exchange.readiness import Readiness, in_backward
from paceline.exchange.replica import Statistics
from paceline.links.group import Group
from paceline.record.recorder import Recorder
from paceline.tune.chunk import ChunkTuner

_numbers = itertools.count()  # all ranks make their modules parallel in the same order


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
    buffers become those of rank 0; later its buffers are sent before each forward pass in training
    but those that follow one in `no_sync`, as DistributedDataParallel does. The first backward pass
    is exchanged as a whole, after it is over, and shows in which order gradients become ready.
    `chunk` is a number of layers, or a tuner that looks for it while training goes on: rank 0's
    times decide, for all.
    """

    def __init__(
        self, module: nn.Module, exchange: Exchange, group: Group, chunk: int | ChunkTuner = 1
    ) -> None:
        self._module, self._exchange, self._group = module, exchange, group
        self._number = next(_numbers)
        self._named = trainable(module, group.device)
        self._has_buffers = any(True for _ in module.buffers())
        self._frozen = [p for p in module.parameters() if not p.requires_grad]
        check_same(module, self._named, group)
        group.broadcast([*_data(module.parameters()), *_data(module.buffers())])
        self._tuner = None if isinstance(chunk, int) else chunk
        self._chunk = chunk if isinstance(chunk, int) else chunk.chunk
        self._layout: Layout | None = None
        self._chunks: tuple[Chunk, ...] = ()
        self._handed: list[tuple[Slot, Tensor | None, int | None]] = []
        self._step_end: float | None = None
        self._num_recorded = 0
        self._began_phase = False
        self._send_next = True  # as DDP: after a forward pass whose gradients were exchanged
        self._readiness = Readiness([(name, p) for _, name, p in self._named], self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward pass."""
        if self._readiness.interrupted:
            self._discard()
        if self._module.training and torch.is_grad_enabled() and not in_backward():
            self._exchange.before_forward()
            if self._send_next and self._has_buffers:
                self._send_buffers()
            self._send_next = not self._readiness.paused
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
        for slot in self._chunks[chunk].slots:
            gradient = slot.parameter.grad
            version = None if gradient is None else gradient._version
            self._handed.append((slot, gradient, version))
        self._exchange.ready(self._chunks[chunk], self._readiness.touched)

    def ended(self, missing: Sequence[int]) -> None:
        """Exchange what is missing, and wait for all."""
        if self._began_phase and self._exchange.recorder is not None:
            self._exchange.recorder.end_phase()
            self._began_phase = False
        check_frozen(self._module, self._frozen)
        if self._layout is None:
            self._agree()
            self._exchange.begin()
            missing = range(len(self._chunks))
        for number in missing:
            self.ready(number)
        changed = self._changed_too_late()
        try:
            self._exchange.finish(self._readiness.touched)
        except StepDiscarded:
            self._forget_gradients()
            raise
        if changed is not None:
            raise InvalidInput(
                f"parameter {changed!r}: its gradient was changed or taken away by a hook after it "
                "had been handed over; change gradients in tensor hooks, or after backward"
            )
        if self._tuner is not None:
            self._tune(self._tuner)

    def _changed_too_late(self) -> str | None:
        """Name a parameter with whose gradient a hook of the user's has done something of its own.

        The hooks of a parameter run in the order of their registration: some before ours, and some
        after it.
        """
        handed, self._handed = self._handed, []
        for slot, gradient, version in handed:
            if gradient is not slot.parameter.grad:
                return slot.name
            if gradient is None and self._readiness.touched[slot.index]:
                return slot.name
            if gradient is not None and gradient._version != version:
                return slot.name
        return None

    def _agreed_order(self, own: Sequence[int] | None) -> list[int] | None:
        return agreed_order(own, len(self._named), self._group, self._number)

    def _agree(self) -> None:
        order = self._agreed_order(self._readiness.order)
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
        began = self._readiness.began
        self._readiness.clear()
        self._handed = []
        self._forget_gradients()
        if self._layout is None:
            self._agreed_order(None)
        else:
            if not began:  # it failed before the first gradient
                self._exchange.begin()
            self._exchange.discard()

    def _forget_gradients(self) -> None:
        """Keep gradients of this rank alone from updating what all have in common."""
        for _, _, parameter in self._named:
            parameter.grad = None

    def _send_buffers(self) -> None:
        self._group.broadcast_together(_data(self._module.buffers()))


def _data(tensors: Any) -> list[Tensor]:
    return [tensor.detach() for tensor in tensors]
