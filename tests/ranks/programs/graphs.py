"""Backward passes that repeat, fail, recompute, or reach only parts of a graph."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F
from declared import plain, program, programs, trains
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from steps import (
    backward,
    differences,
    learn,
    makes,
    mlp,
    module_of,
    squares,
    stepped,
    trained,
    zeroed,
)
from trial import OURS, Run, Trial, gradients


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


@makes(lambda: {"first": nn.Linear(6, 6), "middle": nn.Linear(6, 6), "last": nn.Linear(6, 2)})
def incomplete(self, x):
    """Run a function that gives the middle layer's weight no gradient."""
    x = WithoutWeightGradient.apply(self.first(x), self.middle.weight) + self.middle.bias
    return self.last(x)


def several_forwards_before_one_backward(trial, model, step):
    """A siamese network: three passes through one module, and one loss."""
    return nn.functional.triplet_margin_loss(*(model(trial.batch(10 * step + i)) for i in range(3)))


def _backwards(losses_of: Callable[..., Iterable[Tensor]], **options: Any) -> Run:
    """Return a program that runs backward for each of `losses_of(trial, model, step)`."""

    def run(trial: Trial) -> Iterator[Any]:
        model = trial.wrap(mlp(6, 8, 4), **options)
        for step in zeroed(model, 3):
            for loss in losses_of(trial, model, step):
                loss.backward(retain_graph=True)
                yield gradients(trial.bare(model))

    return run


def _of_two_forwards(trial: Trial, model: nn.Module, step: int) -> list[Tensor]:
    return [model(trial.share(10 * step + i)).square().mean() for i in range(2)]


def _same_twice(trial: Trial, model: nn.Module, step: int) -> list[Tensor]:
    return [model(trial.share(step)).square().mean()] * 2


# If backward runs more often than forward, or after the next forward pass, DDP exchanges only the
# first backward pass. Paceline's own exchanges include all of them.
programs(
    __name__,
    {
        "several_forwards_and_a_backward_for_each": _backwards(_of_two_forwards),
        "backward_of_the_earlier_forward_last": _backwards(
            lambda *known: reversed(_of_two_forwards(*known))
        ),
        "two_losses_of_one_forward_with_retain_graph": _backwards(
            lambda trial, model, step: [
                half.square().mean() for half in model(trial.share(step)).chunk(2, dim=1)
            ]
        ),
        "two_backwards_of_one_forward": _backwards(_same_twice),
        "two_backwards_of_one_forward_with_unused_parameters_sought": _backwards(
            _same_twice, find_unused_parameters=True
        ),
    },
    exact_by=OURS,
)


@program(raises="RuntimeError")
def backward_twice_without_retain_graph(trial):
    model = trial.wrap(mlp())
    loss = learn(trial, model, 0)
    yield "once"
    loss.backward()


@trains(lambda: nn.Sequential(nn.Linear(6, 8), nn.Softplus(), nn.Linear(8, 1)))
def gradients_with_create_graph(trial, model):
    """Run backward through gradients that were computed with create_graph."""
    x = trial.batch(0)
    for _ in zeroed(model, 2):
        loss = model(x).square().mean()
        slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        yield backward(loss + sum(slope.square().sum() for slope in slopes))


def _with_an_error(trial: Trial, **options: Any) -> Iterator[Any]:
    """Raise in the middle of backward of step 2 on all ranks, and continue with step 3."""

    def fail(gradient: Tensor) -> None:
        if step == 2:
            raise FloatingPointError("in the middle of backward")

    @module_of(first=mlp(6, 8, 8), last=mlp(8, 8, 3))
    def breaking(self, x: Tensor) -> Tensor:
        between = self.first(x)
        between.register_hook(fail)
        return self.last(between)

    model = trial.wrap(breaking, **options)
    for step in stepped(model, 5):
        try:
            yield learn(trial, model, step)
        except FloatingPointError:
            model.zero_grad()
            yield "failed"


programs(
    __name__,
    {
        "error_in_the_middle_of_backward": _with_an_error,
        "error_in_the_middle_of_backward_with_unused_parameters_sought": lambda trial: (
            _with_an_error(trial, find_unused_parameters=True)
        ),
    },
    raises="RuntimeError",
    better="a backward pass that failed on all ranks is discarded",
)


def error_in_forward_on_all_ranks(trial, model):
    for step in stepped(model, 4):
        x = trial.batch(step, 4, 5 if step == 2 else 6)
        yield trial.refused(lambda x=x: backward(model(x).square().mean()))


def step_without_backward(trial, model):
    """Skip backward in odd steps on all ranks, as for a NaN loss."""
    for step in stepped(model, 5):
        loss = squares(trial)(model, step)
        yield backward(loss) if step % 2 == 0 else loss


def loss_multiplied_by_zero(trial, model, step):
    """All gradients are zero, and none is None."""
    return (model(trial.batch(step)) * 0.0).sum()


def half() -> nn.Module:
    """Return a module with a layer that is never used."""
    return module_of(used=mlp(), unused=mlp())(lambda self, x: self.used(x))


@makes(lambda: {"layers": nn.ModuleList(mlp(6, 6) for _ in range(4))})
def branches(self, x, order):
    """Compute branches in a given order."""
    outputs = {number: self.layers[number](x).tanh() for number in order}
    return sum(outputs[number] for number in range(4))


@trains(branches, steps=5)
def order_of_use_that_changes(trial, model, step):
    """Compute branches in another order in each step, the same on all ranks."""
    order = [(number * (2 * step + 1) + step) % 4 for number in range(4)]
    return model(trial.batch(step), order).square().mean()


@trains(branches, steps=4)
def order_of_use_that_differs_between_ranks(trial, model, step):
    """Ranks compute branches, and so their gradients, in different orders."""
    return model(trial.batch(step), [[0, 1, 2, 3], [3, 1, 0, 2]][trial.rank > 0]).square().mean()


def backward_in_another_thread(trial, model):
    """Run steps in a thread other than the main one."""

    def step_of(step: int) -> Tensor:
        return backward(model(trial.batch(step, dtype=torch.float64)).square().mean())

    with ThreadPoolExecutor(1) as pool:
        for step in stepped(model, 3):
            yield pool.submit(step_of, step).result()


class Tied(nn.Module):
    """A language model with tied embedding and head, and layers in checkpoints."""

    def __init__(self, use_reentrant: bool | None = None, times: int = 1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.layers = nn.ModuleList(mlp(6, 6, 6) for _ in range(2))
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.use_reentrant, self.times = use_reentrant, times

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for _ in range(self.times):
            for layer in self.layers:
                x = x + self._run(layer, x)
        return self.head(x)

    def _run(self, layer: nn.Module, x: Tensor) -> Tensor:
        if self.use_reentrant is None:
            return layer(x)
        return checkpoint(layer, x, use_reentrant=self.use_reentrant)


def _language(trial: Trial) -> Any:
    def loss_of(model: nn.Module, step: int) -> Tensor:
        x = trial.batch(step, 4, 5).mul(10).long().abs() % 7
        return F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())

    return loss_of


def tied(*known: Any, **options: Any) -> Run:
    """Return a program that trains `Tied(*known)`."""
    return plain(lambda: Tied(*known), loss=_language, **options)


def sequence_of_checkpoints_with_dropout(trial):
    """Recomputation draws the same random numbers and restores the random streams."""
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.Tanh()) for _ in range(4)]

    segments = module_of(layers=nn.Sequential(*layers))(
        lambda self, x: checkpoint_sequential(self.layers, 2, x, use_reentrant=False)
    )
    yield from trained(trial.wrap(segments), squares(trial))


programs(
    __name__,
    {
        "several_forwards_with_unused_parameters_sought": plain(
            mlp, loss=differences, find_unused_parameters=True
        ),
        # The first step shows that a part is never used.
        "static_graph_with_an_unused_layer": plain(half, steps=4, static_graph=True),
        # Its autograd.Function returns None for a weight; DDP sets the gradient to zero.
        "function_without_a_weight_gradient": plain(incomplete),
        "function_without_a_weight_gradient_with_unused_parameters_sought": plain(
            incomplete, find_unused_parameters=True
        ),
        "tied_embedding": tied(),
        "tied_embedding_with_checkpoints": tied(False),
        "tied_embedding_with_reentrant_checkpoints": tied(True),
        # As in ALBERT: the same layers are applied repeatedly.
        "layers_used_twice": tied(None, 3),
        "layers_used_twice_in_checkpoints": tied(False, 2),
        "layers_used_twice_in_reentrant_checkpoints_of_a_static_graph": tied(
            True, 2, steps=4, static_graph=True
        ),
        "checkpoints_of_a_static_graph": tied(False, steps=4, static_graph=True),
    },
)
programs(
    __name__,
    {"layers_used_twice_in_reentrant_checkpoints": tied(True, 2)},
    raises="RuntimeError",
    better="a parameter may become ready more than once in a backward pass",
)
