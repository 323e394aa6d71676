"""Cases in which autograd makes gradients ready in unusual ways: often, late, never, or oddly."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ranks import Place, batch, case, quick, settled, sgd, square, trained


class Net(nn.Module):
    """Layers a, b and c of one size, which `order` uses one after another."""

    def __init__(self, order: str = "abc", layers: str = "abc") -> None:
        super().__init__()
        self.order = order
        for name in layers:
            setattr(self, name, nn.Linear(6, 6).double())

    def forward(self, x: Tensor, order: str = "") -> Tensor:
        for name in order or self.order:
            x = torch.tanh(getattr(self, name)(x))
        return x


class Wrapped(Net):
    """A net that runs its layers through `run`."""

    def __init__(self, order: str, run: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__(order)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        x = self.c(x)
        for name in self.order:
            x = torch.tanh(self.run(getattr(self, name), x))
        return x


class Branches(Net):
    """Sums branches that are computed in the given order."""

    def forward(self, x: Tensor, order: str = "abc") -> Tensor:
        computed = {name: torch.tanh(getattr(self, name)(x)) for name in order}
        return sum(computed[name] for name in sorted(order))


def reentrant(module: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(module, x, use_reentrant=True)


def saved(module: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(module, x, use_reentrant=False)


@case
def plain(place: Place):
    return trained(place, Net)


@case
def tied_weights(place: Place):
    def make() -> nn.Module:
        net = Net()
        net.c.weight = net.a.weight
        return net

    return trained(place, make)


@case
def cell_that_runs_many_times(place: Place):
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.read = nn.RNNCell(6, 5).double(), nn.Linear(5, 2).double()

        def forward(self, x: Tensor) -> Tensor:
            hidden = x.new_zeros(len(x), 5)
            for _ in range(4):
                hidden = self.cell(x, hidden)
            return self.read(hidden)

    return trained(place, Cell)


@case
def lstm(place: Place):
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.read = nn.LSTM(6, 4, num_layers=2).double(), nn.Linear(4, 2).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.read(self.lstm(x)[0])

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        return model(batch(rank, step, 3, 4, 6)).square().mean()

    return trained(place, Reader, loss)


@quick
def twice_in_reentrant_checkpoints(place: Place):
    return trained(place, lambda: Wrapped("aba", reentrant))


@case
def once_in_reentrant_checkpoints(place: Place):
    return trained(place, lambda: Wrapped("ab", reentrant))


@case
def twice_in_checkpoints(place: Place):
    return trained(place, lambda: Wrapped("aba", saved))


@quick
def whole_call_in_a_reentrant_checkpoint(place: Place):
    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        return reentrant(model, batch(rank, step).requires_grad_()).square().mean()

    return trained(place, Net, loss)


@case
def whole_call_in_a_checkpoint(place: Place):
    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        return saved(model, batch(rank, step)).square().mean()

    return trained(place, Net, loss)


@quick
def two_backwards_of_one_forward(place: Place):
    module, oracle = place.build(Net)
    parallel = place.parallel(module)
    optimizers = sgd(parallel), sgd(oracle)
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for loss in square(parallel, place.rank, step), place.mean(square, oracle, step):
            loss.backward(retain_graph=True)
            (3 * loss).backward()
        for optimizer in optimizers:
            optimizer.step()
    return settled(parallel, oracle)


@case
def two_forwards_one_backward(place: Place):
    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        return (model(batch(rank, step)) * model(batch(rank, step + 100))).mean()

    return trained(place, Net, loss)


@quick
def two_forwards_two_backwards(place: Place):
    module, oracle = place.build(Net)
    parallel = place.parallel(module)
    optimizers = sgd(parallel), sgd(oracle)
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        first, second = square(parallel, place.rank, step), square(parallel, place.rank, step + 50)
        first.backward()
        second.backward()
        (place.mean(square, oracle, step) + place.mean(square, oracle, step + 50)).backward()
        for optimizer in optimizers:
            optimizer.step()
    return settled(parallel, oracle)


@quick
def gradient_penalty(place: Place):
    """The outputs are differentiated for the inputs first, which makes no parameter's gradient."""

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        x = batch(rank, step).requires_grad_()
        outputs = model(x)
        (slope,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
        return outputs.square().mean() + slope.square().mean()

    return trained(place, Net, loss)


@quick
def unused_everywhere(place: Place):
    return trained(place, lambda: Net("ab"), find_unused_parameters=True)


@quick
def unused_without_being_looked_for(place: Place):
    return trained(place, lambda: Net("ab"))


@quick
def unused_in_a_static_graph(place: Place):
    return trained(place, lambda: Net("ab"), static_graph=True)


@quick
def unused_on_one_rank(place: Place):
    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        return model(batch(rank, step), "ab" if rank == 1 and step > 0 else "abc").square().mean()

    return trained(place, Net, loss, find_unused_parameters=True)


@quick
def unused_on_the_rank_that_sets_the_order(place: Place):
    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        return model(batch(rank, step), "bc" if rank == 0 else "abc").square().mean()

    return trained(place, Net, loss, find_unused_parameters=True)


@case
def order_that_differs_between_ranks(place: Place):
    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        return model(batch(rank, step), "cab" if rank else "abc").square().mean()

    return trained(place, Branches, loss)


@case
def order_that_changes_between_steps(place: Place):
    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        return model(batch(rank, step), ("abc", "cab", "bca")[step % 3]).square().mean()

    return trained(place, Branches, loss, steps=6)


@case
def frozen_from_the_start(place: Place):
    def make() -> nn.Module:
        net = Net()
        net.b.requires_grad_(False)
        return net

    return trained(place, make)


@quick
def frozen_in_mid_training(place: Place):
    def freeze(model: nn.Module, step: int) -> None:
        if step == 2:
            model.b.requires_grad_(False)

    return trained(place, Net, at_step=freeze)


@quick
def unfrozen_in_mid_training(place: Place):
    def thaw(model: nn.Module, step: int) -> None:
        model.b.requires_grad_(step >= 2)

    def make() -> nn.Module:
        net = Net()
        net.b.requires_grad_(False)
        return net

    return trained(place, make, at_step=thaw)


@case
def unfrozen_when_another_exchange_begins(place: Place):
    """The next exchange was prepared for the parameters that were trainable before."""

    def thaw(model: nn.Module, step: int) -> None:
        model.b.requires_grad_(step >= 13)  # after the steps in which the first one is tried

    def make() -> nn.Module:
        net = Net()
        net.b.requires_grad_(False)
        return net

    return trained(place, make, steps=16, at_step=thaw, exchange="auto", chunk="auto")


@quick
def run_by_one_rank_alone_after_unfreezing(place: Place):
    """Torch's new reducer would meet the other ranks in the next forward pass, which is alone."""
    parallel: list[nn.Module] = []

    def thaw(model: nn.Module, step: int) -> None:
        model.b.requires_grad_(step >= 2)
        if step == 3 and model is parallel[0].module:
            if place.rank == 0:
                parallel[0](batch(0, 99))
            dist.barrier()

    def make() -> nn.Module:
        net = Net()
        net.b.requires_grad_(False)
        return net

    def wrap(model: nn.Module) -> nn.Module:
        parallel.append(model)
        return model

    return trained(place, make, wrap=wrap, steps=5, at_step=thaw)
