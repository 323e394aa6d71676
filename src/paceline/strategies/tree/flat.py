"""All gradients of one type in one flat buffer, which goes up the tree and comes down again."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from paceline.exchange.layout import Layout, Slot


class Flat:
    """The slots of one type, one after another, and behind them a flag for each.

    The flag says whether the gradient has changed; added up, on how many ranks it has. With
    `as_views` gradients are parts of the buffer from the first exchange on.
    """

    def __init__(
        self, layout: Layout, dtype: torch.dtype, device: torch.device, as_views: bool
    ) -> None:
        same = [slot for slot in layout.slots if slot.dtype == dtype]
        # Complex values begin at an even place, and so come first.
        self._slots = sorted(same, key=lambda slot: not slot.parameter.is_complex())
        self._as_views = as_views
        self._numel = sum(slot.num_values for slot in self._slots)
        self.values = torch.zeros(self._numel + len(self._slots), dtype=dtype, device=device)
        self.incoming = torch.empty_like(self.values)
        self._parts = dict(self._cut(self.values))

    def _cut(self, flat: Tensor) -> Iterator[tuple[int, Tensor]]:
        start = 0
        for slot in self._slots:
            size = slot.num_values
            part = flat[start : start + size].view(slot.parameter.dtype)
            yield slot.index, part.as_strided(slot.parameter.size(), slot.stride)
            start += size

    def fill(self, touched: Sequence[bool]) -> None:
        """Take in this rank's gradients."""
        for slot in self._slots:
            part, gradient = self._parts[slot.index], slot.parameter.grad
            if gradient is None:
                part.zero_()
            elif not _is_view(gradient, part):
                part.copy_(gradient)
        flags = [float(touched[slot.index]) for slot in self._slots]
        self.values[self._numel :] = torch.tensor(flags, device=self.values.device)

    def divide(self, num_ranks: int) -> None:
        """Make the sums of all ranks their means."""
        self.values[: self._numel] /= num_ranks

    def hand_out(self) -> list[int]:
        """Give each gradient that changed on any rank its mean; return the slots' indices."""
        changed = self.values[self._numel :].tolist()
        handed = [slot for slot, count in zip(self._slots, changed, strict=True) if count]
        for slot in handed:
            self._hand(slot)
        return [slot.index for slot in handed]

    def _hand(self, slot: Slot) -> None:
        part, gradient = self._parts[slot.index], slot.parameter.grad
        if gradient is not None and _is_view(gradient, part):
            return
        if self._as_views:
            slot.parameter.grad = part
        elif gradient is None:
            slot.parameter.grad = torch.empty_like(slot.parameter).copy_(part)
        else:
            gradient.copy_(part)


def _is_view(gradient: Tensor, part: Tensor) -> bool:
    return gradient.data_ptr() == part.data_ptr() and gradient.numel() > 0
