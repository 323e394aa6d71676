"""Buffers, mostly those of batch norms."""

import torch
from declared import plain, program, programs, trains
from torch import Tensor, nn

from steps import differences, learn, mlp, normed, squares, stepped, trained


class Schedule(nn.Module):
    """Buffers of several dtypes: one is replaced, one is not persistent, one is None."""

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


@trains(normed)
def batch_norm_in_training_and_evaluation(trial, model):
    """Running statistics in evaluation are rank 0's on all ranks."""
    for seen in trained(model, squares(trial), steps=5):
        yield seen
        yield trial.evaluated(model, 30)


@trains(normed, broadcast_buffers=False)
def batch_norm_without_broadcast(trial, model):
    yield from trained(model, squares(trial))
    yield trial.evaluated(model, 30)


@trains(normed)
def batch_norm_with_accumulation(trial, model):
    """Buffers are not broadcast before the forward pass that follows one in no_sync."""
    for step in stepped(model, 3):
        with model.no_sync():
            for micro in range(2):
                yield learn(trial, model, 10 * step + micro)
        yield learn(trial, model, 10 * step + 2)


@program(raises="ValueError")
def sync_batch_norm_is_refused_without_gpus(trial):
    trial.wrap(nn.SyncBatchNorm.convert_sync_batchnorm(normed()))
    yield "never"


@trains(normed)
def buffer_that_is_reset_in_the_middle(trial, model):
    """Reset statistics on rank 1 only; the next forward pass restores those of rank 0."""
    yield from trained(model, squares(trial))
    if trial.rank == 1:
        model.module[1].reset_running_stats()
    yield "reset"
    yield from trained(model, squares(trial))


@trains(normed)
def batch_norm_recomputed_over_the_data(trial, model):
    """Estimate statistics again in training mode without gradients, as for SWA."""
    yield from trained(model, squares(trial))
    with torch.no_grad():
        for step in range(3):
            model(trial.batch(20 + step))
            yield step
    yield from trained(model, squares(trial))


programs(
    __name__,
    {
        # The argument's new name: buffers are broadcast at construction only.
        "batch_norm_without_forward_sync": plain(normed, forward_sync_buffers=False),
        # Without init_sync, ranks keep their different weights; buffers are broadcast later.
        "weights_that_nobody_makes_equal": plain(normed, init_sync=False),
        # Sending buffers between two forward passes must not break the first one's graph.
        "batch_norm_with_two_forwards": plain(normed, loss=differences),
        "buffers_of_many_types_that_are_replaced": plain(Schedule, steps=4),
    },
)
