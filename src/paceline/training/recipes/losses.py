"""Losses and scores of models that predict tokens."""

from math import log

import torch.nn.functional as F
from torch import Tensor

from paceline.training.data.windows import IGNORED


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy in nats, the mean over all targets but those that are -100.

    `logits` (..., V), `targets` (...) int64: of the next tokens or of masked ones. Without any
    target it is 0, and so are its gradients.
    """
    places = targets.flatten()
    total = F.cross_entropy(logits.flatten(0, -2), places, ignore_index=IGNORED, reduction="sum")
    return total / (places != IGNORED).sum().clamp(min=1)


def bits_per_byte(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the loss in bits; per byte if the tokens are bytes, and else per token."""
    return next_token_loss(logits, targets) / log(2)
