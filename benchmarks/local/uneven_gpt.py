"""A GPT of a million parameters, which the process with RANK 1 trains at a quarter of the speed."""

import os
import time
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.utils.data import Subset

from paceline.data.text import load_text
from paceline.models.transformers import gpt_1m
from paceline.recipes.losses import bits_per_byte, next_token_loss
from paceline.recipes.recipe import Recipe

CONTEXT = 256
_LEARNING_RATE, _NUM_TESTED = 0.003, 64
_SLOWER = 4


class SlowLoss:
    """A loss that waits in training, so that a worker's step takes four times as long.

    By the processor's time for everything since the step before: so for loading, forward, backward
    and update of as many samples as it has.
    """

    def __init__(self) -> None:
        self._ended_s = time.process_time()

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of the next tokens, after the wait."""
        if torch.is_grad_enabled():
            time.sleep((_SLOWER - 1) * (time.process_time() - self._ended_s))
            self._ended_s = time.process_time()
        return next_token_loss(outputs, targets)


def recipe() -> Recipe:
    """Return the recipe of every rank but 1, or of rank 1."""
    data = load_text("", (CONTEXT,), seed=0)
    found = Recipe(
        model=partial(gpt_1m, data.num_classes),
        train=data.train,
        test=Subset(data.test, range(_NUM_TESTED)),
        loss=next_token_loss,
        score=bits_per_byte,
        optimizer=partial(torch.optim.AdamW, lr=_LEARNING_RATE),
        num_classes=data.num_classes,
        name="gpt-1m",
    )
    return replace(found, loss=SlowLoss()) if os.environ.get("RANK") == "1" else found
