"""A GPT of a million parameters, which the process with RANK 1 trains at a quarter of the speed."""

import os
import time
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from statistics import median

import torch
from torch import nn
from torch.utils.data import Subset

from paceline.data.text import load_text
from paceline.models.transformers import gpt_1m
from paceline.recipes.losses import bits_per_byte, next_token_loss
from paceline.recipes.recipe import Recipe

CONTEXT = 256
_LEARNING_RATE, _NUM_TESTED = 0.003, 64
_SLOWER, _NUM_MEASURED = 4, 7


class Slow(torch.optim.AdamW):
    """AdamW that waits after each step, so that steps come a quarter as often as without waiting.

    How often that is, is measured in the first steps: by the processor's time for everything since
    the step before, so for loading, forward, backward and update.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, lr)
        self._ended_s = time.process_time()
        self._measured: list[float] = []

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Take a step, and wait."""
        super().step()
        own_s = time.process_time() - self._ended_s
        if len(self._measured) < _NUM_MEASURED:
            self._measured.append(own_s)
        else:
            time.sleep(max(0.0, _SLOWER * median(self._measured) - own_s))
        self._ended_s = time.process_time()


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
