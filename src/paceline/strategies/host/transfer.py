"""Copy gradients between a CPU worker and the shared memory of its machine, the arena."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.plan import Kind
from paceline.exchange.layout import Chunk, Layout, Slot
from paceline.links.arena import Arena
from paceline.record.recorder import Recorder


@dataclass
class ExchangeTimes:
    """Total seconds of a rank's exchanges: exposed, and hidden because backward overlaps them."""

    exposed_s: float = 0.0
    hidden_s: float = 0.0


def bytes_of(chunk: Chunk, memory: Tensor) -> Tensor:
    """Return the bytes of a chunk as a part of `memory`, which has the arena's layout."""
    first, last = chunk.slots[0], chunk.slots[-1]
    return memory[first.offset : last.offset + last.nbytes]


def changed_on_any(arena: Arena, step: int) -> list[int]:
    """Return for each parameter 1 if its gradient changed on any rank, otherwise 0."""
    changed: list[int] = arena.flags.numpy()[:, :, step % 2].max(0).tolist()
    return changed


class CpuTransfer:
    """Copies a CPU worker's gradients into the arena, and the means back.

    `as_views`: gradients become copy-on-write views of the means, which saves the copy back. Once
    the program modifies gradients in place, for example to clip them, means are copied instead,
    because page faults would cost more.
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
        """Do nothing, because `receive` waits for all chunks."""

    def send(self, chunk: Chunk, recorder: Recorder | None) -> None:
        """Copy the chunk's gradients into this rank's slot and post it."""
        # Record directly, because `noted` would take as long as the copy of a small chunk.
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
        """Do nothing, because `send` has posted the chunk."""

    def count_times(self) -> None:
        """Do nothing, because `HostExchange` counts all times."""

    @torch.no_grad()
    def receive(self, step: int) -> None:
        """Wait for the step, and replace gradients that changed on any rank by their means."""
        self._arena.wait_step()
        # If the program has written into a view, copying is cheaper than views from now on.
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
        """Do nothing, because there is no thread."""

    def _copy_out(self, slot: Slot, step: int) -> None:
        gradient = slot.parameter.grad
        if gradient is None or gradient.stride() != slot.stride or self._is_view(gradient, slot):
            # A later step would overwrite a view of the arena.
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
