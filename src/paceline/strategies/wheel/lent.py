"""Copy a model's last layers to a device for each use (Du et al. 2017, section 3.4.2).

    server, in main memory     parameters, optimizer state, waiting gradients
            |  parameters                             ^  gradients
            v                                         |
    hub's device               head (last layers): forward, backward

The device has the head's parameters only while it computes an answer to a worker.
"""

import torch
from torch import Tensor, nn

from paceline.core.plan import Kind, Lane
from paceline.core.wire_format import Purpose
from paceline.training.models.halves import trainable

# The purpose of each kind of copy during an answer, and the device's lane for it in the trace.
COPIES = {
    Kind.H2D: (Purpose.HEAD_PARAMETERS, Lane.H2D),
    Kind.D2H: (Purpose.HEAD_GRADIENTS, Lane.D2H),
}


class LentHead:
    """The head (last layers) on a device; main memory lends it parameters when needed.

    `model`: a second copy of the model. `head`: the head of this copy, which moves to the device.
    `kept`: the head in main memory.
    """

    def __init__(
        self, model: nn.Module, head: nn.Module, kept: nn.Module, device: torch.device
    ) -> None:
        self.model, self.head = model, head.to(device)
        self._kept, self.device = kept, device
        self.parameters = trainable(self.head)  # empty except during an answer
        self.empty()

    def fill(self) -> None:
        """Copy the parameters and buffers from main memory to the device."""
        for own, kept in zip(self.head.parameters(), self._kept.parameters(), strict=True):
            own.data = kept.detach().to(self.device)
        self._copy_buffers(self._kept, self.head)

    def done(self, gradients: list[Tensor]) -> list[Tensor]:
        """Copy gradients and buffers to main memory after an answer; return the gradients."""
        self._copy_buffers(self.head, self._kept)
        return [one.cpu() for one in gradients]

    def empty(self) -> None:
        """Free the parameters' memory on the device."""
        for own in self.head.parameters():
            own.grad = None
            own.data = torch.empty(0, dtype=own.dtype, device=self.device)

    @torch.no_grad()
    def _copy_buffers(self, source: nn.Module, target: nn.Module) -> None:
        for found, own in zip(source.buffers(), target.buffers(), strict=True):
            own.copy_(found)
