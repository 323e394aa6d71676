"""Cases of gradients that lie in memory in another way than one value after another."""

import torch
from torch import Tensor, nn

from ranks import Place, batch, case, settled, trained


@case
def channels_last(place: Place):
    def make() -> nn.Module:
        layers = nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 2, 3)
        return nn.Sequential(*layers).double().to(memory_format=torch.channels_last)

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        x = batch(rank, step, 2, 3, 7, 7).to(memory_format=torch.channels_last)
        return model(x).square().mean()

    return trained(place, make, loss)


@case
def gradients_with_other_strides_than_parameters(place: Place):
    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kept = nn.Parameter(torch.randn(5, 6, dtype=torch.float64).t())
            self.every_other = nn.Parameter(torch.randn(5, 10, dtype=torch.float64)[:, ::2])

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x @ self.kept) @ self.every_other.t()

    return trained(place, Transposed)


@case
def sparse_gradients(place: Place):
    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        return model(torch.tensor([rank, step, 7])).square().mean()

    def make() -> nn.Module:
        return nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2)).double()

    module, oracle = place.build(make)
    parallel = place.parallel(module)
    for step in range(3):
        for model, value in (
            (parallel, loss(parallel, place.rank, step)),
            (oracle, place.mean(loss, oracle, step)),
        ):
            model.zero_grad()
            value.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad.to_dense()
    return settled(parallel, oracle)
