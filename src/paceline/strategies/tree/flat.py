"""All values of one type in one flat buffer: gradients on their way up, parameters down."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from paceline.core.errors import InvalidInput
from paceline.exchange.layout import Layout, Slot


class Flat:
    """The slots of one type, one after another, and behind them a flag for each.

    The flag says whether the gradient has changed; added up, on how many ranks it has.
    """

    def __init__(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
        self._slots = tuple(slot for slot in layout.slots if slot.parameter.dtype == dtype)
        numel = sum(slot.parameter.numel() for slot in self._slots)
        self._numel = numel
        self.values = torch.zeros(numel + len(self._slots), dtype=dtype, device=device)
        self.incoming = torch.empty_like(self.values)
        self._parts = dict(self._cut(self.values))
        self._parameters = dict(self._cut(self.incoming))

    def _cut(self, flat: Tensor) -> Iterator[tuple[int, Tensor]]:
        start = 0
        for slot in self._slots:
            size = slot.parameter.numel()
            part = flat[start : start + size]
            yield slot.index, part.as_strided(slot.parameter.size(), slot.stride)
            start += size

    @property
    def nbytes(self) -> int:
        """Bytes of a message."""
        return self.values.nbytes

    def fill(self, touched: Sequence[bool]) -> None:
        """Take in this rank's gradients."""
        for slot in self._slots:
            part, gradient = self._parts[slot.index], slot.parameter.grad
            if gradient is None:
                part.zero_()
            elif gradient.data_ptr() == part.data_ptr():
                raise InvalidInput(
                    f"parameter {slot.name!r}: still had the gradient of the last exchange when "
                    "others were accumulated in no_sync; with tree, clear gradients first"
                )
            else:
                part.copy_(gradient)
        flags = [float(touched[slot.index]) for slot in self._slots]
        self.values[self._numel :] = torch.tensor(flags, device=self.values.device)

    def hand_out(self, num_ranks: int | None) -> None:
        """Make each gradient that changed anywhere the mean over `num_ranks`; None: forget it."""
        if num_ranks is not None:
            self.values[: self._numel] /= num_ranks
        changed = self.values[self._numel :].tolist()
        for slot, count in zip(self._slots, changed, strict=True):
            if num_ranks is None or not count:
                slot.parameter.grad = None
            else:
                slot.parameter.grad = self._parts[slot.index]

    def parameters(self, slots: Sequence[Slot], fill: bool) -> Iterator[Tensor]:
        """Yield what has to be sent, once filled with the parameters of `slots`: few messages.

        They do not lie where the gradients are, which belong to the user until the next step.
        """
        own = [slot for slot in slots if slot.index in self._parameters]
        if fill:
            for slot in own:
                self._parameters[slot.index].copy_(slot.parameter)
        if len(own) == len(self._slots):
            yield self.incoming[: self._numel]
        else:
            for slot in own:
                part = self._parameters[slot.index]
                yield part.as_strided((part.numel(),), (1,))

    def take_over(self, slots: Sequence[Slot]) -> None:
        """Give the parameters of `slots` what is in the buffer."""
        for slot in slots:
            if slot.index in self._parameters:
                slot.parameter.copy_(self._parameters[slot.index])
