"""A head whose parameters stay in main memory but while it answers (Du et al. 2017, section 3.4.2).

    server, in main memory     parameters, optimizer's state, gradients that wait
            |  parameters                             ^  gradients
            v                                         |
    hub's device               head of one worker: forward, backward     then nothing

So a device needs one set of the head's parameters, however many workers it answers.
"""

import torch
from torch import Tensor, nn

from paceline.core.plan import Kind, Lane
from paceline.core.wire_format import Purpose
from paceline.training.models.halves import trainable

# What is copied for an answer, and on which lane of the device.
COPIES = {
    Kind.H2D: (Purpose.HEAD_PARAMETERS, Lane.H2D),
    Kind.D2H: (Purpose.HEAD_GRADIENTS, Lane.D2H),
}


class LentHead:
    """A head on a device, which has the parameters of another one while it answers.

    `head` is that of `model`, a model of its own that is moved to the device; `kept` is the head
    with the parameters, whose buffers are as the answers leave them.
    """

    def __init__(
        self, model: nn.Module, head: nn.Module, kept: nn.Module, device: torch.device
    ) -> None:
        self.model, self.head = model, head.to(device)
        self._kept, self.device = kept, device
        self.empty()

    def fill(self) -> None:
        """Copy the parameters and buffers to the device."""
        for own, kept in zip(self.head.parameters(), self._kept.parameters(), strict=True):
            own.data = kept.detach().to(self.device)
        self._copy_buffers(self._kept, self.head)

    def done(self, gradients: list[Tensor]) -> list[Tensor]:
        """Copy an answer's gradients, and the buffers, to main memory; return the gradients."""
        self._copy_buffers(self.head, self._kept)
        return [one.cpu() for one in gradients]

    def empty(self) -> None:
        """Free what the parameters take on the device."""
        for own in self.head.parameters():
            own.grad = None
            own.data = torch.empty(0, dtype=own.dtype, device=self.device)

    @torch.no_grad()
    def _copy_buffers(self, source: nn.Module, target: nn.Module) -> None:
        for found, own in zip(source.buffers(), target.buffers(), strict=True):
            own.copy_(found)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that are trained, which have values from `fill` to `empty`."""
        return trainable(self.head)
