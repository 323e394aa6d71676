"""Cases of a user's own hooks on gradients, which run before ours or after."""

import torch
from graphs import Net
from torch import Tensor, nn

from ranks import Place, case, quick, trained


@case
def tensor_hooks_that_scale(place: Place):
    def make() -> nn.Module:
        net = Net()
        net.a.weight.register_hook(lambda gradient: 3 * gradient)
        return net

    def scale_late(model: nn.Module, step: int) -> None:
        if step == 2:
            model.b.weight.register_hook(lambda gradient: -gradient)

    return trained(place, make, at_step=scale_late)


@case
def post_accumulate_hooks_that_read(place: Place):
    read: list[float] = []

    def make() -> nn.Module:
        net = Net()
        net.a.weight.register_post_accumulate_grad_hook(lambda p: read.append(float(p.grad.sum())))
        return net

    def read_late(model: nn.Module, step: int) -> None:
        if step == 2:
            model.b.weight.register_post_accumulate_grad_hook(
                lambda p: read.append(float(p.grad.sum()))
            )

    return trained(place, make, at_step=read_late) | {"read": len(read)}


def _double(parameter: Tensor) -> None:
    parameter.grad.mul_(2)


@case
def post_accumulate_hook_that_scales_before_ours(place: Place):
    def make() -> nn.Module:
        net = Net()
        net.b.weight.register_post_accumulate_grad_hook(_double)
        return net

    return trained(place, make)


@quick
def post_accumulate_hook_that_scales_after_ours(place: Place):
    """Such a hook may change a gradient after it was sent: it must count, or be refused."""

    def scale_late(model: nn.Module, step: int) -> None:
        if step == 2:
            model.b.weight.register_post_accumulate_grad_hook(_double)

    return trained(place, Net, at_step=scale_late)


def _update(parameter: Tensor) -> None:
    with torch.no_grad():
        parameter -= 0.1 * parameter.grad
    parameter.grad = None


@quick
def optimizer_in_backward_before_ours(place: Place):
    def make() -> nn.Module:
        net = Net()
        net.b.weight.register_post_accumulate_grad_hook(_update)
        return net

    return trained(place, make)


@quick
def optimizer_in_backward_after_ours(place: Place):
    def update_late(model: nn.Module, step: int) -> None:
        if step == 2:
            model.b.weight.register_post_accumulate_grad_hook(_update)

    return trained(place, Net, at_step=update_late)
