"""Buffers: those of batch norms above all."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from trial import Trial, gradients, mlp, program, sgd, squares, trained


def normed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


class Schedule(nn.Module):
    """Buffers of other types, one that is replaced, and one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.register_buffer("steps", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("mask", torch.ones(6, dtype=torch.bool))
        self.register_buffer("scale", torch.ones(()), persistent=False)
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.scale = self.scale * (0.9 + 0.01 * float(x.detach().mean()))
        self.mask[int(self.steps[0]) % 6] ^= True
        return self.net(x * self.mask) * self.scale


@program
def batch_norm_in_training_and_evaluation(trial: Trial) -> Iterator[Any]:
    """Running statistics in evaluation are rank 0's on all ranks."""
    model = trial.wrap(normed())
    optimizer = sgd(model)
    for step in range(5):
        model.train()
        optimizer.zero_grad()
        loss = model(trial.batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        yield loss
        model.eval()
        with torch.no_grad():
            yield model(trial.batch(30))


@program
def batch_norm_without_broadcast(trial: Trial) -> Iterator[Any]:
    model = trial.wrap(normed(), broadcast_buffers=False)
    yield from trained(model, squares(trial))
    model.eval()
    with torch.no_grad():
        yield model(trial.batch(30))


@program
def batch_norm_without_forward_sync(trial: Trial) -> Iterator[Any]:
    """The argument's new name: buffers are sent at construction, and never again."""
    model = trial.wrap(normed(), forward_sync_buffers=False)
    yield from trained(model, squares(trial))


@program
def batch_norm_without_initial_sync(trial: Trial) -> Iterator[Any]:
    """init_sync=False: whoever says so has equal weights already."""
    torch.manual_seed(3)
    model = trial.wrap(normed(), init_sync=False)
    yield from trained(model, squares(trial))


@program
def weights_that_nobody_makes_equal(trial: Trial) -> Iterator[Any]:
    """init_sync=False with other weights on each rank leaves them so."""
    model = trial.wrap(mlp(), init_sync=False)
    yield from trained(model, squares(trial))


@program
def batch_norm_with_accumulation(trial: Trial) -> Iterator[Any]:
    """Buffers are not sent before the forward pass that follows one in no_sync."""
    model = trial.wrap(normed())
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        with model.no_sync():
            for micro in range(2):
                model(trial.batch(10 * step + micro)).square().mean().backward()
                yield micro
        model(trial.batch(10 * step + 2)).square().mean().backward()
        yield gradients(model)
        optimizer.step()


@program
def batch_norm_with_two_forwards(trial: Trial) -> Iterator[Any]:
    """Buffers may be sent between two forward passes without breaking the first one's graph."""
    model = trial.wrap(normed())
    yield from trained(
        model,
        lambda model, step: (
            (model(trial.batch(step)) - model(trial.batch(10 + step))).square().mean()
        ),
    )


@program
def group_and_layer_norms(trial: Trial) -> Iterator[Any]:
    module = nn.Sequential(
        nn.Linear(6, 8), nn.GroupNorm(2, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3)
    )
    yield from trained(trial.wrap(module), squares(trial))


@program(raises="ValueError")
def sync_batch_norm_is_refused_without_gpus(trial: Trial) -> Iterator[Any]:
    trial.wrap(nn.SyncBatchNorm.convert_sync_batchnorm(normed()))
    yield "never"


@program
def buffers_of_many_types_that_are_replaced(trial: Trial) -> Iterator[Any]:
    yield from trained(trial.wrap(Schedule()), squares(trial), steps=4)


@program
def buffer_that_is_reset_in_the_middle(trial: Trial) -> Iterator[Any]:
    """Statistics that only rank 1 resets are rank 0's again with the next forward pass."""
    model = trial.wrap(normed())
    yield from trained(model, squares(trial))
    if trial.rank == 1:
        model.module[1].reset_running_stats()
    yield "reset"
    yield from trained(model, squares(trial))


@program
def batch_norm_recomputed_over_the_data(trial: Trial) -> Iterator[Any]:
    """Statistics are estimated anew without gradients, in training mode, as SWA does."""
    model = trial.wrap(normed())
    yield from trained(model, squares(trial))
    with torch.no_grad():
        for step in range(3):
            model(trial.batch(20 + step))
            yield step
    yield from trained(model, squares(trial))
