"""Cut a step's batch into sub-batches; compute the cross entropy of logits split among ranks.

A row is a sample of a classifier, or a token of a language model, whose samples have T rows.

    rank 0   [sample 0: T rows][sample 1: T rows] | [sample 2: T rows]      sub-batch 0 | 1
    rank 1   [sample 3: T rows]                   | [sample 4: T rows]

Logits have shape (rows, classes), and their columns are split among ranks. Targets have shape
(rows,). Rows with target -100 are ignored. The loss is the mean over all other rows of the batch.
"""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from paceline.core.errors import InvalidInput
from paceline.training.data.text import IGNORED
from paceline.training.models.sharded import Shard
from paceline.training.recipes.losses import check_classes, class_loss, next_token_loss
from paceline.training.recipes.recipe import Recipe, described, scalar_of

_INSTEAD = "use strategy allreduce, host or tree"


def label_message(targets: Tensor, most: int, num_classes: int) -> Tensor:
    """Return a rank's targets as a message to all ranks: int64 of shape (1, 2 + most).

    `targets`: class numbers of shape (samples,) or (samples, tokens). `most`: maximum number of
    rows per rank. The message consists of the number of samples, the number of rows, the targets,
    and zeros as padding. Raises InvalidInput if a class number is not below `num_classes`, if there
    are too many rows, or if targets are not int64.
    """
    rows = targets.flatten()
    if rows.dtype != torch.int64:
        raise InvalidInput("data", "must have int64 class numbers as targets", got=rows.dtype)
    if len(rows) > most:
        raise InvalidInput(
            "data",
            f"must have samples as long as the first one: a worker's batch then has at most {most} "
            f"targets, but this batch has {len(rows)}",
            hint="pad all samples to one length",
        )
    known = rows[rows != IGNORED]
    if len(known) and not 0 <= int(known.min()) <= int(known.max()) < num_classes:
        raise InvalidInput(
            "data",
            f"has classes {int(known.min())} to {int(known.max())}, but the model has "
            f"{num_classes} outputs",
        )
    message = rows.new_zeros(1, 2 + most)
    message[0, 0], message[0, 1] = len(targets), len(rows)
    message[0, 2 : 2 + len(rows)] = rows
    return message


@dataclass(frozen=True)
class StepBatch:
    """The batch of a step over all ranks, cut into sub-batches.

    `targets`: the targets of all rows, in rank order. `rows[rank][number]`: the rows of `rank` in
    sub-batch `number`, as indices into `targets`. `num_counted`: number of rows that count in the
    loss.
    """

    targets: Tensor
    rows: tuple[tuple[Tensor, ...], ...]
    num_counted: int

    @classmethod
    def of(cls, messages: Tensor, num_sub_batches: int) -> Self:
        """Build the batch from all ranks' label messages, of shape (ranks, 2 + most)."""
        counts: list[list[int]] = messages[:, :2].tolist()
        targets = torch.cat(
            [row[2 : 2 + own] for row, (_, own) in zip(messages, counts, strict=True)]
        )
        parts = torch.arange(len(targets)).split([own for _, own in counts])
        rows = []
        for places, (num_samples, own) in zip(parts, counts, strict=True):
            samples = places.view(num_samples, own // max(1, num_samples))
            rows.append(tuple(one.flatten() for one in samples.tensor_split(num_sub_batches)))
        return cls(targets, tuple(rows), num_counted(targets))

    def sizes_of(self, number: int) -> tuple[int, ...]:
        """Return each rank's number of rows in sub-batch `number`."""
        return tuple(len(parts[number]) for parts in self.rows)

    def rows_of(self, number: int) -> Tensor:
        """Return the rows of sub-batch `number`, as indices into `targets`, in rank order."""
        return torch.cat([parts[number] for parts in self.rows])


def num_counted(targets: Tensor) -> int:
    """Return the number of rows with a target other than -100 (ignored in the loss)."""
    return int((targets != IGNORED).sum())


def loss_terms(logits: Tensor, targets: Tensor, shard: Shard) -> Tensor:
    """Return three terms per row, from which all ranks compute the loss: shape (N, 3).

    `logits`: this rank's columns, of shape (N, size). The terms are the row's largest logit m, the
    sum s of exp(logit - m), and the target's logit t, which is 0 if another rank has this logit.
    """
    largest = logits.amax(1)
    sums = (logits - largest.unsqueeze(1)).exp_().sum(1)
    of_target = torch.zeros_like(largest)
    rows, places = _own_targets(targets, shard)
    of_target[rows] = logits[rows, places]
    return torch.stack((largest, sums, of_target), 1)


@dataclass(frozen=True)
class CrossEntropy:
    """The cross entropy of each row, and two values per row for its gradients.

    From the ranks' terms m, s and t of a row (`loss_terms`):

        M = max m,    S = sum of s exp(m - M),    loss = log S + M - sum of t

    `losses`: 0 for ignored rows. `largest`: M. `log_sum`: log S. All have shape (N,).
    """

    losses: Tensor
    largest: Tensor
    log_sum: Tensor

    @classmethod
    def of(cls, terms: Tensor, targets: Tensor) -> Self:
        """Compute the loss from the terms of all ranks, in rank order: shape (ranks, N, 3)."""
        largest, sums, of_target = terms.unbind(2)
        whole = largest.amax(0)
        log_sum = (sums * (largest - whole).exp()).sum(0).log()
        # This order of additions keeps a small loss precise even if logits are large.
        losses = log_sum + (whole - of_target.sum(0))
        return cls(losses.masked_fill_(targets == IGNORED, 0.0), whole, log_sum)

    def gradients(self, logits: Tensor, targets: Tensor, shard: Shard, scale: float) -> Tensor:
        """Return the gradients of `scale` * sum(losses) with respect to a rank's logits: (N, size).

        The gradient of a row's loss with respect to a logit is exp(logit - M) / S, minus 1 for the
        target's logit. `shard`: the rank's columns.
        """
        found = (logits - self.largest.unsqueeze(1)).sub_(self.log_sum.unsqueeze(1)).exp_()
        rows, places = _own_targets(targets, shard)
        found[rows, places] -= 1
        return found.mul_(scale * (targets != IGNORED).to(found.dtype).unsqueeze(1))


def _own_targets(targets: Tensor, shard: Shard) -> tuple[Tensor, Tensor]:
    """Return the rows whose target is a column of `shard`, and the indices of these columns."""
    places = targets - shard.first
    rows = ((places >= 0) & (places < shard.size)).nonzero().flatten()
    return rows, places[rows]


def check_objective(recipe: Recipe, outputs: Any, targets: Any) -> None:
    """Raise InvalidInput unless a recipe's loss is cross entropy with one target per row.

    `outputs`: the model's outputs, of which only the shape is used. Calls the recipe's score
    once with zeros as outputs, to check that the score works.
    """
    loss = recipe.loss
    of_tokens = loss is next_token_loss
    if not (of_tokens or loss in (class_loss, cross_entropy) or _is_plain(loss)):
        raise InvalidInput(
            "loss",
            "must be cross_entropy without options, class_loss or next_token_loss, because each "
            "worker has only a part of the logits",
            got=getattr(loss, "__name__", type(loss).__name__),
            hint=_INSTEAD,
        )
    fits = isinstance(outputs, Tensor) and isinstance(targets, Tensor)
    fits = fits and outputs.shape[:-1] == targets.shape and targets.dtype == torch.int64
    if not fits or (outputs.ndim != 2 and not of_tokens):
        rows = "(samples, tokens, classes)" if of_tokens else "(samples, classes)"
        raise InvalidInput(
            "loss",
            f"requires outputs {rows} and an int64 target per row, not outputs "
            f"{described(outputs)} and targets {described(targets)}",
        )
    if recipe.num_classes is not None:
        check_classes(recipe.name, outputs, targets, recipe.num_classes)
    if recipe.score is not None:
        zeros = torch.zeros(()).expand(outputs.shape)
        scalar_of(f"score of {recipe.name}", recipe.score, zeros, targets)


def _is_plain(loss: Any) -> bool:
    """Return whether a loss is `nn.CrossEntropyLoss` without options."""
    plain = nn.CrossEntropyLoss()
    is_usual = type(loss) is nn.CrossEntropyLoss and loss.weight is None
    return is_usual and all(
        getattr(loss, key) == getattr(plain, key) for key in plain.__constants__
    )
