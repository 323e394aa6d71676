"""A lent head has its parameters on the device only while it computes an answer."""

import torch
from torch import Tensor, nn

from paceline.strategies.wheel.server import LentHead


def head() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


def answer(module: nn.Module, inputs: Tensor) -> list[Tensor]:
    module(inputs).square().sum().backward()
    return [one.grad for one in module.parameters() if one.grad is not None]


def test_gradients_and_running_means_equal_those_of_a_head_on_the_cpu(device) -> None:
    kept, other, own, inputs = head(), head(), head(), torch.randn(5, 6)
    lent = LentHead(own, own, kept, device.torch_device)

    def nbytes() -> int:
        return sum(one.untyped_storage().nbytes() for one in lent.head.parameters())

    with device.use():
        for _ in range(2):
            assert nbytes() == 0
            other.zero_grad()
            expected = answer(other, inputs)
            lent.fill()
            assert nbytes() == sum(one.nbytes for one in kept.parameters())
            assert {one.device for one in lent.parameters} == {device.torch_device}
            found = lent.done(answer(lent.head, inputs.to(device.torch_device)))
            lent.empty()
            assert all(one.grad is None for one in lent.parameters)
            assert {one.device.type for one in (*found, *kept.parameters())} == {"cpu"}
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
            # The server updates its parameters; the next answer must use the new ones.
            with torch.no_grad():
                for one in (*kept.parameters(), *other.parameters()):
                    one.mul_(0.5)
    torch.testing.assert_close(list(kept.buffers()), list(other.buffers()))
    assert not torch.equal(kept[1].running_mean, head()[1].running_mean)
    assert nbytes() == 0
