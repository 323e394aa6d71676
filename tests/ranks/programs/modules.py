"""Recurrent and parametrized modules, hooks, and unusual calls of modules."""

from typing import Any

import torch
from declared import trains
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from steps import backward, learn, mlp, module_of, squares, stepped, trained
from trial import gradients, state_of


def hooks_of_tensors(trial):
    """Hooks on parameters and activations see and change this rank's own gradients."""
    module = mlp(6, 8, 8, 3)
    seen: list[Tensor] = []

    def double(gradient: Tensor) -> Tensor:
        seen.append(gradient.clone())
        return gradient * 2

    module[0].weight.register_hook(double)
    model = trial.wrap(module)
    module[2].bias.register_hook(double)
    for step in stepped(model, 3):
        out = model(trial.batch(step))
        out.register_hook(double)
        backward(out.square().mean())
        yield sorted(float(gradient.sum()) for gradient in seen)
        seen.clear()


def unrolled() -> nn.Module:
    @module_of(cell=nn.GRUCell(6, 6))
    def model(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x)
        for _ in range(3):
            state = self.cell(x, state)
        return state

    return model


@trains(unrolled)
def rnn_cell_unrolled(trial, model, step):
    return squares(trial)(model, step)


def weight_norm_and_spectral_norm(trial):
    """Train parametrizations of weights; spectral norm has buffers."""
    module = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(6, 8)),
        nn.Tanh(),
        parametrizations.spectral_norm(nn.Linear(8, 8)),
        nn.Tanh(),
        parametrizations.orthogonal(nn.Linear(8, 3)),
    )
    model = trial.wrap(module)
    yield from trained(model, squares(trial), steps=4)
    model.eval()
    with torch.no_grad(), parametrize.cached():
        yield model(trial.batch(30))


def hooks_of_modules(trial):
    """Forward and full backward hooks run once per pass, with DDP's values."""
    module = mlp(6, 8, 8, 3)
    seen: list[Any] = []
    module[0].register_forward_pre_hook(lambda module, args: seen.append(args[0].sum()))
    module[0].register_forward_hook(lambda module, args, out: out * 1.1)
    module[2].register_full_backward_hook(lambda module, before, after: seen.append(after[0].sum()))
    module[2].register_full_backward_pre_hook(lambda module, after: (after[0] * 0.9,))
    model = trial.wrap(module)
    model.register_forward_hook(lambda module, args, out: out + 0.1)
    model.register_full_backward_hook(lambda module, before, after: seen.append(after[0].sum()))
    for loss in trained(model, squares(trial)):
        yield [loss, list(seen)]
        seen.clear()


def features_taken_with_a_hook(trial):
    """Use an activation that a hook captured in the loss, as perceptual losses do."""
    module = mlp(6, 8, 8, 3)
    taken: dict[str, Tensor] = {}
    module[2].register_forward_hook(lambda module, args, out: taken.update(features=out))
    model = trial.wrap(module)
    for step in stepped(model, 3):
        yield backward(squares(trial)(model, step) + taken["features"].abs().mean())


def wrapper_within_a_module(trial):
    """A part is wrapped, and the whole around it is not."""
    torch.manual_seed(9)
    whole = nn.Sequential(trial.wrap(mlp(6, 8, 8)), nn.Tanh(), nn.Linear(8, 3))
    for step in stepped(whole, 3):
        learn(trial, whole, step)
        yield [gradients(whole[2]), list(state_of(whole))]
        whole.train(step % 2 == 0)


def attributes_through_the_wrapper(trial):
    """Names, modes and attributes are DDP's, and missing attributes raise the same error."""

    @module_of(net=mlp(), config={"width": 8})
    def named(self, x: Tensor) -> Tensor:
        return self.net(x)

    model = trial.wrap(named)
    yield [name for name, _ in model.named_parameters()]
    yield [name for name, _ in model.named_modules()]
    yield [
        model.module.config,
        model.training,
        model.eval().module.training,
        hasattr(model, "config"),
    ]
    yield trial.refused(lambda: model.config)
    yield isinstance(model, nn.parallel.DistributedDataParallel)
    for name in (
        "device_ids", "output_device", "dim", "broadcast_buffers", "find_unused_parameters",
        "gradient_as_bucket_view", "static_graph", "require_backward_grad_sync", "device",
    ):  # fmt: skip
        yield [name, str(getattr(model, name))]


def arguments_of_ddp_in_their_order(trial):
    """Pass device_ids, output_device and dim by position, as old code does."""
    torch.manual_seed(3)
    kind = type(trial.wrap(mlp()))
    model = kind(mlp(), None, None, 0, False)
    yield [model.dim, model.broadcast_buffers]
    yield trial.refused(lambda: trial.wrap(mlp(), device_ids=[0]))
    yield trial.refused(lambda: trial.wrap(mlp(), device_ids=[0, 1]))
    yield trial.refused(lambda: trial.wrap(mlp(), no_such_argument=1))
