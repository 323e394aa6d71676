"""Losses and scores of classifiers and language models.

For classification, outputs are scores (N, C), and targets are int64 class numbers (N,). For
language models, outputs are logits (..., V), and targets are int64 (...), the next tokens or the
original tokens at masked positions.
"""

from math import log
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from paceline.core.errors import InvalidInput
from paceline.training.data.text import IGNORED


def class_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy, in nats; targets are class numbers."""
    return cross_entropy(outputs, targets)


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the share of correctly classified samples, as float64."""
    return (outputs.argmax(1) == targets).double().mean()


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy in nats over targets other than -100; 0 if all are -100."""
    places = targets.flatten()
    total = cross_entropy(logits.flatten(0, -2), places, ignore_index=IGNORED, reduction="sum")
    return total / (places != IGNORED).sum().clamp(min=1)


def bits_per_byte(logits: Tensor, targets: Tensor) -> Tensor:
    """Return `next_token_loss` in bits per token, which are bits per byte if tokens are bytes."""
    return next_token_loss(logits, targets) / log(2)


def check_classes(name: str, outputs: Any, targets: Tensor, num_classes: int) -> None:
    """Raise InvalidInput unless a model returns a score for each class or vocabulary token.

    `name`: name of the model in errors. A model may return more scores than there are classes.
    """
    num_dims = targets.ndim + 1
    if not isinstance(outputs, torch.Tensor) or outputs.ndim != num_dims:
        shape = tuple(getattr(outputs, "shape", ())) or type(outputs).__name__
        is_of_samples = num_dims == 2  # whether scores are per sample (N, C), not per token
        wanted = "(batch, classes)" if is_of_samples else "(batch, tokens, vocabulary)"
        raise InvalidInput(f"model {name}", f"must return scores of shape {wanted}", got=shape)
    given = outputs.shape[-1]
    if given < num_classes:
        problem = f"must return a score for each of the data's {num_classes} classes"
        raise InvalidInput(f"model {name}", problem, got=given)
