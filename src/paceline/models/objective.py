"""The loss of a training and the score of a test, for class numbers and for several labels.

Targets are int64 class numbers (N,), or bool rows (N, num_labels) where a sample may have several
labels at once. The data type says which.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from paceline.core.errors import InvalidInput, first_line
from paceline.data.dataset import Dataset, shape_text


@dataclass(frozen=True)
class Objective:
    """A loss, a count of correct samples, and the name of their share.

    `loss(outputs, targets)` of scores (N, C) is a 0-d tensor, the mean over samples; with
    `reduction="sum"` their sum. `num_right(outputs, targets)` is a number from 0 to N.
    """

    loss: Callable[..., Tensor]
    num_right: Callable[[Tensor, Tensor], int]
    name: str


def objective_of(data: Dataset) -> Objective:
    """Return the objective of a data set's targets."""
    return objective_for(data.train.__getitems__([0])[1])


def objective_for(targets: Tensor) -> Objective:
    """Return the objective of a batch's targets."""
    return SEVERAL_LABELS if targets.dtype == torch.bool else ONE_CLASS


@torch.no_grad()
def check_outputs(model: nn.Module, data: Dataset, name: str) -> None:
    """Raise InvalidInput unless the model gives a score for each class of the data.

    It may give more; but where a sample may have several labels, exactly one for each.
    """
    inputs, targets = data.train.__getitems__([0])
    try:
        outputs = model.eval()(inputs)
    except Exception as error:
        raise InvalidInput(
            f"model {name}: fails on a sample of {data.name}, of shape {shape_text(inputs.shape)}: "
            f"{first_line(error)}"
        ) from error
    if not isinstance(outputs, torch.Tensor) or outputs.ndim != 2:
        shape = getattr(outputs, "shape", type(outputs).__name__)
        raise InvalidInput(f"model {name}: gives {shape}, but must give (batch, classes)")
    given, wanted = outputs.shape[1], data.num_classes
    if objective_for(targets) is SEVERAL_LABELS and given != wanted:
        raise InvalidInput(
            f"model {name}: has {given} outputs, but {data.name} has {wanted} labels, of which a "
            f"sample may have several: it needs {wanted} outputs"
        )
    if given < wanted:
        raise InvalidInput(
            f"model {name}: has {given} outputs, but {data.name} has {wanted} classes"
        )


def _label_loss(outputs: Tensor, targets: Tensor, *, reduction: str = "mean") -> Tensor:
    """Cross entropy of the softmax, as in Ma, Rusu et al. 2020, with a sample's labels all alike.

    A sample without labels asks for nothing: its loss and its gradient are zero.
    """
    shares = targets.to(outputs.dtype)
    shares /= shares.sum(1, keepdim=True).clamp(min=1)
    return cross_entropy(outputs, shares, reduction=reduction)


ONE_CLASS = Objective(
    cross_entropy, lambda scores, targets: int((scores.argmax(1) == targets).sum()), "accuracy"
)
# The share of samples of which the highest score is one of their labels.
SEVERAL_LABELS = Objective(
    _label_loss,
    lambda scores, targets: int(targets.gather(1, scores.argmax(1, keepdim=True)).sum()),
    "precision@1",
)
