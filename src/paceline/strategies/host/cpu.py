"""Between the gradients of a CPU rank and the arena: a copy there, and a view back."""

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core.plan import Kind
from paceline.exchange.layout import Chunk, Layout, Slot
from paceline.links.arena import Arena
from paceline.record.recorder import Recorder
from paceline.strategies.host.transfer import changed_on_any


class CpuTransfer:
    """Copies gradients into the arena, and means back into the gradients.

    With `as_views` a parameter's gradient is a view of the result instead, which saves that copy.
    The view is copy-on-write, so that gradients may be changed in place. Where they are (as by
    clipping), the page faults of that cost more than a copy does: then means are copied out.
    """

    def __init__(self, arena: Arena, layout: Layout, as_views: bool) -> None:
        self._arena, self._layout = arena, layout
        self._views: list[dict[int, Tensor]] = [
            {slot.index: slot.of(arena.result(parity)) for slot in layout.slots}
            for parity in (0, 1)
            if as_views
        ]
        self._own = {slot.index: slot.of(arena.slot) for slot in layout.slots}
        self._as_views = as_views

    def begin(self, step: int, chunks: Sequence[Chunk], recorder: Recorder | None) -> None:
        """Nothing has to be prepared."""

    def abandon(self) -> None:
        """Nothing goes on beside the rank's own thread."""

    def send(self, chunk: Chunk, recorder: Recorder | None) -> None:
        """Copy the chunk's gradients into this rank's slot and post it."""
        start = None if recorder is None else recorder.mark()  # `noted` would take as long as it
        self._copy_in(chunk)
        if recorder is not None:
            recorder.add_transfer(Kind.D2H, str(chunk.number), start)
        self._arena.post(chunk.number)

    def arrive(self) -> None:
        """Nothing is under way: a chunk is posted when it is sent."""

    def _copy_in(self, chunk: Chunk) -> None:
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

    @torch.no_grad()
    def receive(self, step: int) -> None:
        """Wait for the step and make every gradient that changed anywhere its mean."""
        self._arena.wait_step()
        if self._as_views and self._arena.refresh(step):
            self._as_views = False
        changed = changed_on_any(self._arena, step)
        for slot in self._layout.slots:
            if not changed[slot.index]:
                self._keep(slot, step)
            elif self._as_views:
                slot.parameter.grad = self._views[step % 2][slot.index]
            else:
                self._copy_out(slot, step)

    def _copy_out(self, slot: Slot, step: int) -> None:
        gradient = slot.parameter.grad
        if gradient is None or gradient.stride() != slot.stride or self._is_view(gradient, slot):
            gradient = torch.empty_like(slot.parameter)
            slot.parameter.grad = gradient
        self._arena.copy_out(step, slot.offset, gradient)

    def _keep(self, slot: Slot, step: int) -> None:
        """Give a gradient that did not change its own memory: the next step but one writes it."""
        gradient = slot.parameter.grad
        if gradient is not None and self._is_view(gradient, slot):
            slot.parameter.grad = gradient.clone()

    def _is_view(self, gradient: Tensor, slot: Slot) -> bool:
        address = gradient.data_ptr()
        return any(view[slot.index].data_ptr() == address for view in self._views)

    def close(self) -> None:
        """Let parameters keep their gradients, but not the arena's memory."""
        for slot in self._layout.slots:
            self._keep(slot, 0)
        self._views, self._own = [], {}
