"""Modules whose forward pass changes something: statistics, buffers, counters, random streams."""

import random

import numpy as np
import torch
from accumulation import no_sync_in_all_micro_batches_but_the_last
from declared import plain, program, programs, trains
from torch import nn

from steps import backward, differences, makes, mlp, normed, squares, stepped, trained
from trial import seed


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


@makes(lambda: {"net": mlp(), "runs": 0, "ran": nn.Buffer(torch.zeros((), dtype=torch.int64))})
def counting(self, x):
    """Count forward passes, in a Python number and in a buffer."""
    self.runs += 1
    self.ran += 1
    return self.net(x) / self.runs


@makes(lambda: {"net": mlp(), "at": 0, "bank": nn.Buffer(torch.zeros(8, 3))})
def remembering(self, x):
    """Keep the last features, as contrastive learning with a memory bank does."""
    features = self.net(x)
    with torch.no_grad():
        self.bank[self.at : self.at + len(x)] = features
        self.at = (self.at + len(x)) % len(self.bank)
    return features @ self.bank.clone().T


@makes(lambda: {"net": nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))})
def drawing(self, x):
    """Draw from the random streams of torch, NumPy and Python."""
    x = x + 0.1 * torch.from_numpy(np.random.standard_normal(x.shape))
    return self.net(x * random.random()) + 0.1 * torch.rand(3)


@makes(lambda: {"layers": nn.ModuleList(mlp(6, 6) for _ in range(4))})
def deep(self, x):
    """Stochastic depth: skip layers at random."""
    for layer in self.layers:
        if random.random() < 0.6:
            x = x + layer(x)
    return x


def forward_that_counts_itself(trial):
    """An extra forward pass by the wrapper would be counted and change the loss."""
    module = counting()
    for seen in trained(trial.wrap(module), squares(trial), steps=4):
        yield [seen, module.runs]


def memory_bank(trial):
    module = remembering()
    model = trial.wrap(module)
    for seen in trained(model, squares(trial), steps=4):
        yield [seen, module.at]


@trains(drawing)
def dropout_with_equal_seeds(trial, model):
    """With equal seeds, ranks drop the same units, as the wrapper draws no random numbers."""
    seed(5)
    yield from trained(model, squares(trial), steps=4)
    yield trial.evaluated(model)


@trains(deep, find_unused_parameters=True)
def stochastic_depth_alike_on_all_ranks(trial, model):
    """Other layers in each step, the same on all ranks, with find_unused_parameters."""
    random.seed(3)
    for step in stepped(model, 6):
        yield backward(model(trial.batch(step).requires_grad_()).square().mean())


@trains(deep, find_unused_parameters=True)
def stochastic_depth_of_each_rank(trial, model):
    for step in stepped(model, 6, lambda step: step % 2 == 0):
        yield backward(model(trial.batch(step).requires_grad_()).square().mean())


@trains(counting)
def forward_that_fails_once(trial, model):
    """A failed forward pass, before the first step or later, does not affect training."""
    yield trial.refused(lambda: model(trial.batch(0, 4, 5)))
    yield from trained(model, squares(trial))
    yield trial.refused(lambda: model(trial.batch(0, 4, 5)))
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
        "memory_bank_of_each_rank": plain(remembering, steps=4, broadcast_buffers=False),
        "forward_that_draws_from_all_streams": plain(drawing, steps=4),
    },
)
