"""Losses and scores for language models."""

from math import log

import torch.nn.functional as F
from torch import Tensor

from paceline.training.data.text import IGNORED


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy in nats over targets other than -100.

    `logits`: (..., V). `targets`: int64 (...), the next tokens or the masked tokens. If all targets
    are -100, the loss and its gradients are 0.
    """
    places = targets.flatten()
    total = F.cross_entropy(logits.flatten(0, -2), places, ignore_index=IGNORED, reduction="sum")
    return total / (places != IGNORED).sum().clamp(min=1)


def bits_per_byte(logits: Tensor, targets: Tensor) -> Tensor:
    """Return `next_token_loss` in bits per token; use it if tokens are bytes."""
    return next_token_loss(logits, targets) / log(2)
