"""Compute cross entropy if the columns of the logits are split among ranks.

Logits have shape (rows, classes), targets have shape (rows,). A row is a sample of a classifier, or
a token of a language model. Rows with target -100 are ignored, as in
`torch.nn.functional.cross_entropy`. The loss is the mean over all other rows of the batch.
"""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from paceline.core.errors import InvalidInput
from paceline.training.models.sharded import Shard
from paceline.training.recipes.losses import check_classes, class_loss, next_token_loss
from paceline.training.recipes.recipe import Recipe, described, scalar_of

IGNORED = -100  # the `ignore_index` of torch's cross entropy
_INSTEAD = "use strategy allreduce, host or tree"


def loss_terms(logits: Tensor, targets: Tensor, shard: Shard) -> Tensor:
    """Return three terms per row of a rank's logits for `CrossEntropy`: shape (N, 3).

    `logits`: (N, size). The terms are the largest logit m, the sum s of exp(logit - m), and the
    target's logit t, which is 0 if another rank has that logit.
    """
    largest = logits.amax(1)
    sums = (logits - largest.unsqueeze(1)).exp_().sum(1)
    of_target = torch.zeros_like(largest)
    rows, places = _own_targets(targets, shard)
    of_target[rows] = logits[rows, places]
    return torch.stack((largest, sums, of_target), 1)


@dataclass(frozen=True)
class CrossEntropy:
    """The loss of each row, and two values per row for the gradients: M and log S.

    `losses`: shape (N,), 0 for ignored rows. `largest`: M. `log_sum`: log S. All three fields are
    computed from the terms m, s and t of all ranks (`loss_terms`):

        M = max m,    S = sum of s exp(m - M),    loss = log S + M - sum of t
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
        # This order of operations does not cancel the digits of a small loss if logits are large.
        losses = log_sum + (whole - of_target.sum(0))
        return cls(losses.masked_fill_(targets == IGNORED, 0.0), whole, log_sum)

    def gradients(self, logits: Tensor, targets: Tensor, shard: Shard, scale: float) -> Tensor:
        """Return the gradients of `scale` times the summed losses, for a rank's logits (N, size).

        The gradient of a loss with respect to a logit is exp(logit - M) / S, minus 1 for the
        target's logit.
        """
        found = (logits - self.largest.unsqueeze(1)).sub_(self.log_sum.unsqueeze(1)).exp_()
        rows, places = _own_targets(targets, shard)
        found[rows, places] -= 1
        return found.mul_(scale * (targets != IGNORED).to(found.dtype).unsqueeze(1))


def _own_targets(targets: Tensor, shard: Shard) -> tuple[Tensor, Tensor]:
    """Return the rows whose target is among a rank's classes, and the target's index there."""
    places = targets - shard.first
    rows = ((places >= 0) & (places < shard.size)).nonzero().flatten()
    return rows, places[rows]


def check_objective(recipe: Recipe, outputs: Any, targets: Any) -> None:
    """Raise InvalidInput unless a recipe's loss is cross entropy with one target per row.

    `outputs`: the model's outputs, of which only the shape is used. `targets`: the targets of the
    same samples. If the recipe has a score, the score is called once with outputs of zeros.
    """
    loss, name = recipe.loss, recipe.name
    if isinstance(targets, Tensor) and targets.dtype == torch.bool:
        raise InvalidInput(
            "data", "has several labels per sample, and subbatch needs one", hint=_INSTEAD
        )
    of_tokens = loss is next_token_loss
    if not (of_tokens or loss in (class_loss, cross_entropy) or _is_plain(loss)):
        raise InvalidInput(
            "loss",
            "must be cross_entropy without options, class_loss or next_token_loss, because each "
            "worker has only a part of the logits",
            got=_named(loss),
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
        check_classes(name, outputs, targets, recipe.num_classes)
    if recipe.score is not None:
        zeros = torch.zeros(()).expand(outputs.shape)
        scalar_of(f"score of {recipe.name}", recipe.score, zeros, targets)


def _is_plain(loss: Any) -> bool:
    plain = nn.CrossEntropyLoss()
    options = ("ignore_index", "label_smoothing", "reduction", "weight")
    if type(loss) is not nn.CrossEntropyLoss or loss.weight is not None:
        return False
    return all(getattr(loss, option) == getattr(plain, option) for option in options)


def _named(loss: Any) -> str:
    return getattr(loss, "__name__", type(loss).__name__)
