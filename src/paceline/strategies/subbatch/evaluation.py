"""Test a model whose last layers, the head, are split among ranks."""

from collections.abc import Sequence
from math import log

import torch
from torch import Tensor

from paceline.codecs.gathering import RowExchange
from paceline.exchange.step import Share
from paceline.strategies.subbatch.loss import CrossEntropy, StepBatch, label_message, loss_terms
from paceline.strategies.subbatch.trainer import SplitTrainer
from paceline.training.data.batch import Batch
from paceline.training.data.dataset import IndexedSamples
from paceline.training.recipes.losses import bits_per_byte
from paceline.training.recipes.recipe import Loss

_TEST_BATCH = 256
_TEST_ROWS = 16384


@torch.no_grad()
def evaluate(
    trainer: SplitTrainer, samples: IndexedSamples, score: Loss | None
) -> tuple[float, float]:
    """Test this rank's part of `samples`; all ranks must call it together.

    Returns the loss and the score, summed over this rank's samples.
    """
    model, group = trainer.model, trainer.group
    # BatchNorm's running statistics differ between ranks, so all ranks use those of rank 0.
    group.broadcast(model.body.buffers())
    model.body.eval()
    loss = of_score = 0.0
    ranks = range(group.world_size)
    shares = [range(rank, len(samples), len(ranks)) for rank in ranks]
    most = max(1, min(_TEST_BATCH, _TEST_ROWS // model.rows_per_sample) // len(ranks))
    for first in range(0, len(shares[0]), most):
        parts = [one[first : first + most] for one in shares]
        found = _test(trainer, samples, parts, score)
        loss, of_score = loss + found[0], of_score + found[1]
    model.body.train()
    return loss, of_score


def _test(
    trainer: SplitTrainer, samples: IndexedSamples, shares: Sequence[range], score: Loss | None
) -> tuple[float, float]:
    """Test one batch; return the loss and score, summed over this rank's samples.

    `shares`: for each rank, the indices of its samples in the batch.
    """
    model, rank = trainer.model, trainer.group.rank
    # A batch cannot be empty, so a rank without samples runs sample 0, and drops the result below.
    batch = Batch.of(samples.__getitems__(shares[rank] or [0]))
    batch = batch.to(trainer.group.device)
    share = Share(*batch, 1.0)
    activations = model.activations(model.body, share, trainer.learning)[: len(shares[rank])]
    own = Share(*batch.rows(slice(0, len(shares[rank]))), 1.0)
    most = max(map(len, shares)) * model.rows_per_sample
    messages = _gather(trainer, label_message(own.targets, most, model.num_classes))
    whole = StepBatch.of(messages, 1)
    sizes = whole.sizes_of(0)
    logits = _logits(trainer, _gather(trainer, activations.flatten(0, -2), sizes))
    own_rows, shard = slice(sum(sizes[:rank]), sum(sizes[: rank + 1])), model.head[-1].shard
    terms = loss_terms(logits, whole.targets, shard)
    found = _gather(trainer, terms, [len(terms)] * len(sizes)).view(len(sizes), *terms.shape)
    losses = CrossEntropy.of(found, whole.targets).losses[own_rows]
    loss = float(losses.sum()) * sum(map(len, shares)) / max(1, whole.num_counted)
    if score is None:
        return loss, 0.0
    if score is bits_per_byte:
        return loss, loss / log(2)
    # Gather before the return below, because all ranks must take part.
    rows = _gather(trainer, logits.t(), model.head[-1].sharding.sizes).t()[own_rows]
    if not own.num_samples:
        return loss, 0.0
    return loss, float(score(rows.view(*own.targets.shape, -1), own.targets)) * own.num_samples


def _logits(trainer: SplitTrainer, values: Tensor) -> Tensor:
    """Run the head, and return this rank's columns of the logits: (rows, this rank's classes)."""
    head = trainer.model.head
    for place, layer in enumerate(head):
        if layer.is_linear and place:
            values = _gather(trainer, values.t(), head[place - 1].sharding.sizes).t()
        with trainer.learning.autocast(values.device):
            values = layer.evaluate(values)
    return values


def _gather(trainer: SplitTrainer, values: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
    """Gather the rows of all ranks; `sizes`: their numbers of rows; None: one row each."""
    known = sizes or [1] * trainer.group.world_size
    exchange = RowExchange(None, trainer.thread.process_group, known, what="a test")
    return exchange.all_gather(values).wait()
