"""A rank that exchanges a simulated GPU's gradients with itself through an arena.

The arena of one rank stands in for several ranks: it halves the sums, so a rank gets back half of
its gradients.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from paceline.exchange.layout import Layout, NamedParameter
from paceline.links.arena import Arena
from paceline.links.group import Group
from paceline.strategies.host.transfer import DeviceTransfer, OverlapTimes
from simulated_gpu.device import SimulatedDevice

DEADLINE_S = 30.0


class OneRank:
    """Parameters like the given tensors, an arena, and the transfer between them.

    `layers`: the name of each parameter's layer. A chunk has the gradients of `chunk_size` layers.
    """

    def __init__(
        self,
        device: SimulatedDevice,
        like: Sequence[Tensor],
        layers: Sequence[str],
        chunk_size: int,
    ) -> None:
        self.device, on = device, device.torch_device
        self.parameters = [nn.Parameter(torch.zeros_like(one).to(on)) for one in like]
        named = [NamedParameter(layers[i], str(i), p) for i, p in enumerate(self.parameters)]
        self.layout = Layout.of(named, range(len(named)))
        self.chunks = self.layout.chunks(chunk_size)
        sizes = self.layout.nbytes, len(self.layout.layers), self.layout.num_flags
        self.arena = Arena(Group.alone(on, DEADLINE_S), *sizes, DEADLINE_S, scale=0.5)
        self.arena.set_chunks(
            [[(s.offset, s.num_values, s.dtype) for s in chunk.slots] for chunk in self.chunks]
        )
        memory = self.arena.slot, self.arena.shared_result(0), self.arena.shared_result(1)
        self.unpin = [device.pin(part) for part in memory]
        self.times = OverlapTimes()
        self.transfer = DeviceTransfer(self.arena, self.layout, self.times, DEADLINE_S)

    def begin_step(self, step: int) -> None:
        """Begin a step, in which all gradients change."""
        self.arena.begin(step)
        self.arena.flags[0, :, step % 2] = 1
        self.transfer.begin(step, self.chunks, None)

    def close(self) -> None:
        """Close all parts in the order of `HostExchange`."""
        self.transfer.close()
        for unpin in self.unpin:
            unpin()
        self.arena.close()
