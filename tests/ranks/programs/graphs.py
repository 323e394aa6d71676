"""Graphs that run backward more than once, in parts, through checkpoints, or not to the end."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trial import OURS, Trial, gradients, mlp, program, sgd, squares, trained


class WithoutWeightGradient(torch.autograd.Function):
    """A linear function that has no gradient for its weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        return gradient @ weight, None


class Failing(torch.autograd.Function):
    """The identity, whose backward fails when told so."""

    fails = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if Failing.fails:
            raise FloatingPointError("in the middle of backward")
        return gradient


class Partial(nn.Module):
    """Its middle layer's weight gets no gradient from its function."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = WithoutWeightGradient.apply(self.first(x), self.middle.weight) + self.middle.bias
        return self.last(x)


class Breaking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = mlp(6, 8, 8), mlp(8, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Failing.apply(self.first(x)))


@program
def several_forwards_before_one_backward(trial: Trial) -> Iterator[Any]:
    """A siamese network: three passes through one module, and one loss."""
    model = trial.wrap(mlp())

    def loss_of(model: nn.Module, step: int) -> Tensor:
        anchor, near, far = (model(trial.batch(10 * step + i)) for i in range(3))
        return F.triplet_margin_loss(anchor, near, far)

    yield from trained(model, loss_of)


@program
def several_forwards_with_unused_parameters_sought(trial: Trial) -> Iterator[Any]:
    model = trial.wrap(mlp(), find_unused_parameters=True)
    yield from trained(
        model,
        lambda model, step: (
            (model(trial.batch(step)) - model(trial.batch(10 + step))).square().mean()
        ),
    )


def _twice(trial: Trial, order: Callable[[list[Tensor]], Iterable[Tensor]]) -> Iterator[Any]:
    """Two forward passes, then a backward pass for each."""
    model = trial.wrap(mlp())
    for step in range(3):
        model.zero_grad()
        losses = [model(trial.share(10 * step + i)).square().mean() for i in range(2)]
        for loss in order(losses):
            loss.backward()
            yield gradients(trial.bare(model))


# Where backward runs more often than forward, or later than the next forward, torch's reducer
# exchanges the first backward pass and leaves the others to each rank. Ours exchange them all.


@program(exact_by=OURS)
def several_forwards_and_a_backward_for_each(trial: Trial) -> Iterator[Any]:
    yield from _twice(trial, iter)


@program(exact_by=OURS)
def backward_of_the_earlier_forward_last(trial: Trial) -> Iterator[Any]:
    yield from _twice(trial, reversed)


@program(exact_by=OURS)
def two_losses_of_one_forward_with_retain_graph(trial: Trial) -> Iterator[Any]:
    model = trial.wrap(mlp(6, 8, 4))
    for step in range(3):
        model.zero_grad()
        one, other = model(trial.share(step)).chunk(2, dim=1)
        one.square().mean().backward(retain_graph=True)
        yield gradients(trial.bare(model))
        other.square().mean().backward()
        yield gradients(trial.bare(model))


@program(exact_by=OURS)
def two_backwards_of_one_forward(trial: Trial) -> Iterator[Any]:
    yield from _again(trial, trial.wrap(mlp()))


@program(exact_by=OURS)
def two_backwards_of_one_forward_with_unused_parameters_sought(trial: Trial) -> Iterator[Any]:
    yield from _again(trial, trial.wrap(mlp(), find_unused_parameters=True))


def _again(trial: Trial, model: nn.Module) -> Iterator[Any]:
    for step in range(3):
        model.zero_grad()
        loss = model(trial.share(step)).square().mean()
        loss.backward(retain_graph=True)
        yield gradients(trial.bare(model))
        loss.backward()
        yield gradients(trial.bare(model))


@program(raises="RuntimeError")
def backward_twice_without_retain_graph(trial: Trial) -> Iterator[Any]:
    model = trial.wrap(mlp())
    loss = model(trial.batch(0)).square().mean()
    loss.backward()
    yield "once"
    loss.backward()


@program
def gradients_with_create_graph(trial: Trial) -> Iterator[Any]:
    """backward(create_graph=True), and a second backward through the gradients' own graph."""
    model = trial.wrap(nn.Sequential(nn.Linear(6, 8), nn.Softplus(), nn.Linear(8, 1)))
    x = trial.batch(0)
    for _ in range(2):
        model.zero_grad()
        loss = model(x).square().mean()
        slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        (loss + sum(slope.square().sum() for slope in slopes)).backward()
        yield gradients(model)


@program
def function_without_a_weight_gradient(trial: Trial) -> Iterator[Any]:
    """An autograd.Function that returns None for a weight: zeros under DDP, which waits for it."""
    yield from trained(trial.wrap(Partial()), squares(trial))


@program
def function_without_a_weight_gradient_with_unused_parameters_sought(
    trial: Trial,
) -> Iterator[Any]:
    yield from trained(trial.wrap(Partial(), find_unused_parameters=True), squares(trial))


def _with_an_error(trial: Trial, model: nn.Module) -> Iterator[Any]:
    """The step is lost; DDP goes on with the next forward pass, and so does the user."""
    optimizer = sgd(model)
    for step in range(5):
        optimizer.zero_grad()
        loss = model(trial.batch(step)).square().mean()
        Failing.fails = step == 2
        try:
            loss.backward()
        except FloatingPointError:
            optimizer.zero_grad()
            yield "failed"
            continue
        finally:
            Failing.fails = False
        yield loss
        optimizer.step()


@program(raises="RuntimeError", better="a backward pass that failed on all ranks is discarded")
def error_in_the_middle_of_backward(trial: Trial) -> Iterator[Any]:
    yield from _with_an_error(trial, trial.wrap(Breaking()))


@program(raises="RuntimeError", better="a backward pass that failed on all ranks is discarded")
def error_in_the_middle_of_backward_with_unused_parameters_sought(
    trial: Trial,
) -> Iterator[Any]:
    yield from _with_an_error(trial, trial.wrap(Breaking(), find_unused_parameters=True))


@program
def error_in_forward_on_all_ranks(trial: Trial) -> Iterator[Any]:
    model = trial.wrap(mlp())
    optimizer = sgd(model)
    for step in range(4):
        optimizer.zero_grad()
        width = 5 if step == 2 else 6
        try:
            loss = model(trial.batch(step, 4, width)).square().mean()
        except RuntimeError:
            yield "failed"
            continue
        loss.backward()
        yield loss
        optimizer.step()


@program
def step_without_backward(trial: Trial) -> Iterator[Any]:
    """Some batches are thrown away after forward, on all ranks, as with a loss that is NaN."""
    model = trial.wrap(mlp())
    optimizer = sgd(model)
    for step in range(5):
        optimizer.zero_grad()
        loss = model(trial.batch(step)).square().mean()
        if step % 2 == 0:
            loss.backward()
            optimizer.step()
        yield loss


@program
def loss_that_is_a_constant_of_the_output(trial: Trial) -> Iterator[Any]:
    """Multiplied by zero, every gradient is zero, and none is None."""
    model = trial.wrap(mlp())
    yield from trained(model, lambda model, step: (model(trial.batch(step)) * 0.0).sum())


@program
def static_graph_with_an_unused_layer(trial: Trial) -> Iterator[Any]:
    """The first step shows that a layer is never used."""

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = mlp(), mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    yield from trained(trial.wrap(Half(), static_graph=True), squares(trial), steps=4)


@program
def order_of_use_that_changes(trial: Trial) -> Iterator[Any]:
    """Layers run in another order in each step, the same on all ranks."""

    class Turning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(mlp(6, 6) for _ in range(4))

        def forward(self, x: Tensor, turn: int) -> Tensor:
            for number in range(4):
                x = x + self.layers[(number * (2 * turn + 1) + turn) % 4](x).tanh()
            return x

    model = trial.wrap(Turning())
    yield from trained(
        model, lambda model, step: model(trial.batch(step), step).square().mean(), steps=5
    )


@program
def order_of_use_that_differs_between_ranks(trial: Trial) -> Iterator[Any]:
    """Branches are computed in another order on the other rank: gradients come so, too."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(mlp(6, 6) for _ in range(4))

        def forward(self, x: Tensor, order: list[int]) -> Tensor:
            outputs = {number: self.layers[number](x).tanh() for number in order}
            return sum(outputs[number] for number in range(4))

    model = trial.wrap(Branches())
    order = [0, 1, 2, 3] if trial.rank == 0 else [3, 1, 0, 2]
    yield from trained(
        model, lambda model, step: model(trial.batch(step), order).square().mean(), steps=4
    )


@program
def backward_in_another_thread(trial: Trial) -> Iterator[Any]:
    """Some loaders and servers run steps in a thread that is not the main one."""
    from concurrent.futures import ThreadPoolExecutor

    model = trial.wrap(mlp())
    optimizer = sgd(model)

    def step_of(step: int) -> Tensor:
        optimizer.zero_grad()
        loss = model(trial.batch(step, dtype=torch.float64)).square().mean()
        loss.backward()
        return loss

    with ThreadPoolExecutor(1) as pool:
        for step in range(3):
            yield pool.submit(step_of, step).result()
            optimizer.step()
