"""A GPT of a million parameters, which the process with RANK 1 trains at a quarter of the speed."""

import os
import time
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torch.utils.data import Subset

from paceline.data.text import load_text
from paceline.models.transformers import gpt_1m
from paceline.recipes.losses import bits_per_byte, next_token_loss
from paceline.recipes.recipe import Recipe

CONTEXT = 256
_LEARNING_RATE, _SLOWER, _NUM_TESTED = 0.003, 4, 64


class Slow(torch.optim.AdamW):
    """AdamW whose steps come a quarter as often: after each it waits three times as long.

    As long as the processor needed for everything since the step before, without any waiting: for
    loading, forward, backward and update.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, lr)
        self._began_s = time.process_time()

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Take a step, and wait."""
        super().step()
        time.sleep((_SLOWER - 1) * (time.process_time() - self._began_s))
        self._began_s = time.process_time()


def recipe() -> Recipe:
    """Return the recipe of every rank but 1, or of rank 1."""
    data = load_text("", (CONTEXT,), seed=0)
    found = Recipe(
        model=partial(gpt_1m, data.num_classes),
        train=data.train,
        test=Subset(data.test, range(_NUM_TESTED)),
        loss=next_token_loss,
        score=bits_per_byte,
        optimizer=partial(_optimizer, torch.optim.AdamW),
        num_classes=data.num_classes,
        name="gpt-1m",
    )
    is_slow = os.environ.get("RANK") == "1"
    return replace(found, optimizer=partial(_optimizer, Slow)) if is_slow else found


def _optimizer(
    kind: type[torch.optim.AdamW], parameters: Iterable[nn.Parameter]
) -> torch.optim.AdamW:
    return kind(parameters, _LEARNING_RATE)
