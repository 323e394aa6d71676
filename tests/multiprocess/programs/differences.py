"""Cases of modules that cannot be made parallel, or that differ between ranks."""

import torch
from graphs import Net
from torch import Tensor, nn

from ranks import Place, batch, case, quick, trained


@quick
def other_order_of_parameters(place: Place):
    return trained(place, lambda: Net(layers="abc" if place.rank == 0 else "bac"))


@quick
def other_shapes(place: Place):
    return trained(place, lambda: nn.Linear(6, 3 + place.rank).double())


@quick
def other_number_of_parameters(place: Place):
    return trained(place, lambda: nn.Linear(6, 3, bias=place.rank == 0).double())


@quick
def other_types(place: Place):
    return trained(place, lambda: nn.Linear(6, 3).to(torch.float64 if place.rank else torch.float))


@quick
def other_strides(place: Place):
    def make() -> nn.Module:
        layer = nn.Conv2d(3, 4, 2).double()
        return layer.to(memory_format=torch.channels_last) if place.rank else layer

    return trained(place, make, lambda m, r, s: m(batch(r, s, 2, 3, 4, 4)).square().mean())


@quick
def other_frozen_parameters(place: Place):
    def make() -> nn.Module:
        net = Net("ab")
        net.c = nn.Linear(6, 6 + place.rank).double().requires_grad_(False)
        return net

    return trained(place, make)


@quick
def other_buffers(place: Place):
    def make() -> nn.Module:
        net = Net()
        net.register_buffer("extra", torch.zeros(3 + place.rank))
        return net

    return trained(place, make)


@case
def no_parameters(place: Place):
    return trained(place, nn.Tanh)


@case
def no_trainable_parameters(place: Place):
    return trained(place, lambda: nn.Linear(6, 6).double().requires_grad_(False))


@case
def complex_parameters(place: Place):
    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        return model(batch(rank, step).to(torch.complex64)).abs().mean()

    return trained(place, lambda: nn.Linear(6, 6).to(torch.complex64), loss)
