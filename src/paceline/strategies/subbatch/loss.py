"""Cross entropy of logits of which each rank has some columns, and the recipes that have that loss.

Rows are samples of a classifier, or tokens of a language model: logits (rows, classes), targets
(rows,). A target of -100 asks for nothing, as in `torch.nn.functional.cross_entropy`, and the loss
is the mean over all other rows of the whole batch, however they are spread over ranks.
"""

from dataclasses import dataclass
from math import log
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from paceline.core.errors import InvalidInput
from paceline.training.models.sharded import Shard
from paceline.training.recipes.classification import accuracy, check_classes, class_loss
from paceline.training.recipes.losses import bits_per_byte, next_token_loss
from paceline.training.recipes.recipe import Recipe, described, scalar_of

IGNORED = -100  # the `ignore_index` of torch's cross entropy
_INSTEAD = "take strategy allreduce, host or tree"


def loss_terms(logits: Tensor, targets: Tensor, shard: Shard) -> Tensor:
    """Return a rank's terms of the cross-entropy: (N, 3), of its logits (N, size), targets (N,).

    These are the largest logit m, the sum s of exp(logit - m), and the target's logit t, which is 0
    on all ranks but the one that has it. `CrossEntropy` needs no more of the other ranks' logits.
    """
    largest = logits.amax(1)
    sums = (logits - largest.unsqueeze(1)).exp_().sum(1)
    of_target = torch.zeros_like(largest)
    rows, places = _own_targets(targets, shard)
    of_target[rows] = logits[rows, places]
    return torch.stack((largest, sums, of_target), 1)


@dataclass(frozen=True)
class CrossEntropy:
    """The loss of each row (N,), 0 where it is ignored, and M and log S, which gradients need.

    With the terms m, s and t of all ranks (`loss_terms`):

        M = max m,    S = sum of s exp(m - M),    loss = log S + M - sum of t
    """

    losses: Tensor
    largest: Tensor
    log_sum: Tensor

    @classmethod
    def of(cls, terms: Tensor, targets: Tensor) -> Self:
        """Return the loss of all ranks' terms, in rank order: (ranks, N, 3)."""
        largest, sums, of_target = terms.unbind(2)
        whole = largest.amax(0)
        log_sum = (sums * (largest - whole).exp()).sum(0).log()
        # In this order a small loss does not drown in large logits.
        losses = log_sum + (whole - of_target.sum(0))
        return cls(losses.masked_fill_(targets == IGNORED, 0.0), whole, log_sum)

    def gradients(self, logits: Tensor, targets: Tensor, shard: Shard, scale: float) -> Tensor:
        """Return the gradients (N, size) of `scale` times the sum of the losses.

        The gradient by a logit is exp(logit - M) / S, less 1 at the target.
        """
        found = (logits - self.largest.unsqueeze(1)).sub_(self.log_sum.unsqueeze(1)).exp_()
        rows, places = _own_targets(targets, shard)
        found[rows, places] -= 1
        return found.mul_(scale * (targets != IGNORED).to(found.dtype).unsqueeze(1))


def _own_targets(targets: Tensor, shard: Shard) -> tuple[Tensor, Tensor]:
    """Return the rows whose target is one of a rank's outputs, and its place among them."""
    places = targets - shard.first
    rows = ((places >= 0) & (places < shard.size)).nonzero().flatten()
    return rows, places[rows]


def check_objective(recipe: Recipe, outputs: Any, targets: Any) -> None:
    """Raise InvalidInput unless the loss is cross entropy of these outputs, a row for each target.

    `outputs` and `targets` are those of some samples; the outputs' values are not read. The score
    is tried with zeros.
    """
    loss, name = recipe.loss, recipe.name
    if isinstance(targets, Tensor) and targets.dtype == torch.bool:
        raise InvalidInput(
            "data",
            f"{name} has samples with several labels, which cannot be trained on by subbatch; its "
            "loss is of one class a sample",
            hint=_INSTEAD,
        )
    of_tokens = loss is next_token_loss
    if not (of_tokens or loss in (class_loss, cross_entropy) or _is_plain(loss)):
        raise InvalidInput(
            "loss",
            f"{name} has {_named(loss)}, which needs all logits of a row; with subbatch no worker "
            "has them, and only torch's cross_entropy without options, class_loss and "
            "next_token_loss of paceline.training.recipes are computed from parts",
            hint=_INSTEAD,
        )
    fits = isinstance(outputs, Tensor) and isinstance(targets, Tensor)
    fits = fits and outputs.shape[:-1] == targets.shape and targets.dtype == torch.int64
    if not fits or (outputs.ndim != 2 and not of_tokens):
        rows = "(samples, tokens, classes)" if of_tokens else "(samples, classes)"
        raise InvalidInput(
            "loss",
            f"{_named(loss)} of {name} gets outputs {described(outputs)} and targets "
            f"{described(targets)}",
            hint=f"subbatch needs outputs {rows}, and an int64 target for each row",
        )
    if recipe.num_classes is not None:
        check_classes(name, outputs, targets, recipe.num_classes)
    if recipe.score is not None:
        _check_score(recipe, torch.zeros(()).expand(outputs.shape), targets)


def _check_score(recipe: Recipe, outputs: Tensor, targets: Tensor) -> None:
    assert recipe.score is not None
    scalar_of(f"score of {recipe.name}", recipe.score, outputs, targets)


def _is_plain(loss: Any) -> bool:
    plain = nn.CrossEntropyLoss()
    options = ("ignore_index", "label_smoothing", "reduction", "weight")
    if type(loss) is not nn.CrossEntropyLoss or loss.weight is not None:
        return False
    return all(getattr(loss, option) == getattr(plain, option) for option in options)


def _named(loss: Any) -> str:
    return getattr(loss, "__name__", type(loss).__name__)


@dataclass(frozen=True)
class Tested:
    """Rows of a test of which this rank knows the loss and the best class, as a score needs them.

    All are (N,). `num_samples` have `num_counted` rows that are not ignored, over all ranks.
    """

    losses: Tensor
    classes: Tensor
    targets: Tensor
    num_samples: int
    num_counted: int

    @property
    def loss(self) -> float:
        """This rank's part of the mean loss of all ranks' rows, times the samples."""
        return float(self.losses.sum()) * self.num_samples / max(1, self.num_counted)

    def score(self, score: Any) -> float | None:
        """Return this rank's sum of the score over samples; None if it needs the logits."""
        if score is accuracy:
            return float((self.classes == self.targets).sum())
        return self.loss / log(2) if score is bits_per_byte else None


def best_of(bests: Tensor, classes: Tensor) -> Tensor:
    """Return the class of each row with the best logit: of all ranks' (ranks, N) bests."""
    return classes.gather(0, bests.argmax(0, keepdim=True)).squeeze(0).long()
