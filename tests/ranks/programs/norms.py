"""Buffers, mostly those of batch norms."""

import torch
from accumulation import no_sync_in_all_micro_batches_but_the_last
from declared import plain, program, programs, trains
from torch import nn

from steps import differences, makes, mlp, normed, squares, trained


@makes(
    lambda: {
        "net": mlp(),
        "steps": nn.Buffer(torch.zeros(2, dtype=torch.int64)),
        "mask": nn.Buffer(torch.ones(6, dtype=torch.bool)),
        "scale": nn.Buffer(torch.ones(()), persistent=False),
        "nothing": nn.Buffer(None),
    }
)
def scheduled(self, x):
    """Use buffers of several dtypes: one is replaced, one is not persistent, one is None."""
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


def batch_norm_without_initial_sync(trial):
    """init_sync=False with weights that are already equal."""
    torch.manual_seed(3)
    yield from trained(trial.wrap(normed(), init_sync=False), squares(trial))


@trains(normed)
def batch_norm_with_accumulation(trial, model):
    """Buffers are not broadcast before the forward pass that follows one in no_sync."""
    yield from no_sync_in_all_micro_batches_but_the_last(trial, model)


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
        # Without init_sync, ranks keep their different weights.
        "weights_that_nobody_makes_equal": plain(mlp, init_sync=False),
        # Sending buffers between two forward passes must not break the first one's graph.
        "batch_norm_with_two_forwards": plain(normed, loss=differences),
        "group_and_layer_norms": plain(
            lambda: nn.Sequential(
                nn.Linear(6, 8), nn.GroupNorm(2, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3)
            )
        ),
        "buffers_of_many_types_that_are_replaced": plain(scheduled, steps=4),
    },
)
