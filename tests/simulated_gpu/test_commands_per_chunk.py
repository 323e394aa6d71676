"""The number of a chunk's commands on a simulated GPU does not depend on the number of tensors.

Commands are kernels, copies and waits of the host.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from simulated_gpu.device import SimulatedDevice
from simulated_gpu.lent import simulated_gpus
from simulated_gpu.one_rank import OneRank


class Commands(NamedTuple):
    """The commands of a step: kernels before and after the end of backward, copies and waits."""

    gathers: int
    d2h: int
    syncs: int
    h2d: int
    scatters: int


class Exchange(OneRank):
    """An exchange of gradients like the given tensors, with `chunk_size` tensors in a chunk."""

    def __init__(self, device: SimulatedDevice, like: Sequence[Tensor], chunk_size: int) -> None:
        layers = [str(index // chunk_size) for index in range(len(like))]
        super().__init__(device, like, layers, chunk_size=1)  # each layer is a chunk

    def step(self, gradients: Sequence[Tensor | None]) -> Commands:
        """Exchange gradients, which halves them; return the commands."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        self.device.synchronize()
        counted = self.device.commands
        counted.clear()
        self.begin_step(1)
        for chunk in self.chunks:
            self.transfer.send(chunk, None)
        self.transfer.arrive()
        gathers = counted["kernel"]
        self.arena.commit()
        self.transfer.receive(1)
        scatters = counted["kernel"] - gathers
        return Commands(gathers, counted["d2h"], counted["sync"], counted["h2d"], scatters)


@contextmanager
def exchange(like: Sequence[Tensor], chunk_size: int | None = None) -> Iterator[Exchange]:
    with simulated_gpus() as (device,):
        found = Exchange(device, like, chunk_size or len(like))
        yield found
        found.close()


def exchanged(sent: Sequence[Tensor], chunk_size: int | None = None) -> Commands:
    """Exchange tensors as gradients, check the means, and return the commands."""
    with exchange(sent, chunk_size) as one:
        commands = one.step([tensor.to(one.device.torch_device) for tensor in sent])
        for parameter, tensor in zip(one.parameters, sent, strict=True):
            assert torch.equal(parameter.grad.cpu(), tensor / 2)
        return commands


THREE_TYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize(
    ("num_tensors", "types", "chunk_size", "expected"),
    [
        (1, THREE_TYPES[:1], None, Commands(gathers=1, d2h=1, syncs=1, h2d=1, scatters=1)),
        (64, THREE_TYPES[:1], None, Commands(gathers=1, d2h=1, syncs=1, h2d=1, scatters=1)),
        (16, THREE_TYPES[:1], 4, Commands(gathers=4, d2h=4, syncs=4, h2d=4, scatters=1)),
        (64, THREE_TYPES, None, Commands(gathers=3, d2h=1, syncs=1, h2d=1, scatters=3)),
    ],
)
def test_a_chunk_needs_one_gather_per_dtype_and_a_step_one_scatter_per_dtype(
    num_tensors: int, types: Sequence[torch.dtype], chunk_size: int | None, expected: Commands
):
    sent = [torch.randn(1 + i % 7, 3).to(types[i % len(types)]) for i in range(num_tensors)]
    assert exchanged(sent, chunk_size) == expected


def test_a_gradient_in_another_layout_needs_one_more_kernel():
    """The other gradients still share one kernel."""
    sent = [torch.randn(4, 3) for _ in range(64)]
    with exchange(sent) as one:
        gradients = [tensor.to(one.device.torch_device) for tensor in sent]
        gradients[2] = gradients[2].t().contiguous().t()
        assert one.step(gradients) == Commands(gathers=2, d2h=1, syncs=1, h2d=1, scatters=2)
        for parameter, gradient, tensor in zip(one.parameters, gradients, sent, strict=True):
            assert parameter.grad is gradient
            assert torch.equal(gradient.cpu(), tensor / 2)


def test_strides_of_dimensions_of_size_1_do_not_matter():
    """Such strides differ between the weights and gradients of 1x1 convolutions."""
    sent = [torch.randn(4, 3, 1, 1) for _ in range(16)]
    with exchange(sent) as one:
        gradients = [tensor.to(one.device.torch_device) for tensor in sent]
        gradients[2] = gradients[2].as_strided((4, 3, 1, 1), (3, 1, 3, 3))
        assert one.step(gradients) == Commands(gathers=1, d2h=1, syncs=1, h2d=1, scatters=1)
        assert torch.equal(one.parameters[2].grad.cpu(), sent[2] / 2)


@pytest.mark.parametrize("num_missing", [1, 16])
def test_missing_gradients_need_one_more_kernel_and_count_as_zero(num_missing):
    sent = [torch.randn(5) for _ in range(16)]
    with exchange(sent) as one:
        gradients = [tensor.to(one.device.torch_device) for tensor in sent]
        commands = one.step([None] * num_missing + gradients[num_missing:])
        assert commands.gathers == 1 + (num_missing < 16)
        assert (commands.d2h, commands.h2d) == (1, 1)
        for index, parameter in enumerate(one.parameters):
            expected = torch.zeros(5) if index < num_missing else sent[index] / 2
            assert torch.equal(parameter.grad.cpu(), expected)


def test_foreach_copies_lists_of_several_dtypes_or_layouts_tensor_by_tensor(device):
    """The simulated device counts kernels as torch on CUDA, which copies 64 pairs per launch."""
    on = device.torch_device
    same = [torch.ones(4, 3).to(on) for _ in range(65)]
    mixed = [*same[:2], torch.ones(3).half().to(on)]
    turned = [*same[:2], torch.ones(3, 4).to(on).t()]
    for tensors, count in ((same[:64], 1), (same, 2), (mixed, 3), (turned, 3)):
        targets = [torch.empty(one.size(), dtype=one.dtype, device=on) for one in tensors]
        device.commands.clear()
        torch._foreach_copy_(targets, tensors)
        assert device.commands["kernel"] == count
