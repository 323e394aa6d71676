"""A GPT of 30 million parameters on an even number of windows: two workers train on one each."""

from functools import partial

import torch
from torch.utils.data import Subset

from paceline.training.data.text import load_text
from paceline.training.models.transformers import gpt_30m
from paceline.training.recipes.losses import bits_per_byte, next_token_loss
from paceline.training.recipes.recipe import Recipe

_CONTEXT, _LEARNING_RATE, _NUM_TESTED = 512, 0.0003, 8


def recipe() -> Recipe:
    """Return the recipe."""
    data = load_text("", (_CONTEXT,), seed=0)
    return Recipe(
        model=partial(gpt_30m, data.num_classes),
        train=Subset(data.train, range(len(data.train) // 2 * 2)),
        test=Subset(data.test, range(_NUM_TESTED)),
        loss=next_token_loss,
        score=bits_per_byte,
        optimizer=partial(torch.optim.AdamW, lr=_LEARNING_RATE),
        num_classes=data.num_classes,
        name="gpt-30m",
    )
