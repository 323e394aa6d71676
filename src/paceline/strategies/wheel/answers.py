"""What a head worker does: one forward and backward of the head on what a body hands on."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.core.errors import InvalidInput
from paceline.core.plan import Kind
from paceline.strategies.wheel.flat import take_gradients
from paceline.strategies.wheel.halves import Halves
from paceline.training.objective import objective_for


class Answer(NamedTuple):
    """The residuals for the body, the weighted loss, and the gradients of the head's parameters."""

    residuals: Tensor
    loss: float
    gradients: list[Tensor]


def answer(
    halves: Halves,
    activations: Tensor,
    labels: Tensor,
    weight: float,
    watch: Callable[[Kind], AbstractContextManager[None]],
) -> Answer:
    """Return the answer to a batch; the head's parameters are left without gradients.

    InvalidInput if a parameter's gradient is sparse or has not come, or a label is no class.
    """
    taken_in = activations.detach().requires_grad_()
    objective = objective_for(labels)
    reduction = "mean" if len(labels) else "sum"  # no samples have no mean
    try:
        with torch.enable_grad(), watch(Kind.FORWARD):
            scores = halves.head(taken_in)
            _check_classes(labels, scores)
            loss = objective.loss(scores, labels, reduction=reduction) * weight
        with watch(Kind.BACKWARD):
            loss.backward()
        gradients = take_gradients(halves.head_names, halves.head_parameters)
    finally:
        for parameter in halves.head_parameters:
            parameter.grad = None  # what a failed backward has left
    if taken_in.grad is None:
        raise InvalidInput("the loss does not depend on the activations")
    return Answer(taken_in.grad, float(loss.detach()), gradients)


def check_labels(who: str, labels: Tensor, num_samples: int) -> None:
    """Raise InvalidInput unless there are class numbers, or rows of labels, of so many samples."""
    dimensions = {torch.int64: 1, torch.bool: 2}.get(labels.dtype)
    if labels.dim() != dimensions or len(labels) != num_samples:
        raise InvalidInput(
            f"{who}: labels {labels.dtype} of shape {tuple(labels.shape)} for {num_samples} "
            "samples; class numbers are int64 of one dimension, several labels bool of two"
        )


def _check_classes(labels: Tensor, scores: Tensor) -> None:
    num_classes = scores.shape[1] if scores.dim() == 2 else 0
    if labels.dtype == torch.bool:
        known = labels.shape[1] == num_classes
    else:
        known = not len(labels) or bool(((labels >= 0) & (labels < num_classes)).all())
    if not known:
        raise InvalidInput(
            f"a label is none of the {num_classes} classes that the head tells apart"
        )
