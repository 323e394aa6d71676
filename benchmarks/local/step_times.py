"""Steps of a GPT on two hosts of one core each: alone, exchanging gradients, and local updates."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import sized_gpt
import torch
from steps_of_hosts import distributed, encoded, half
from steps_to_loss import CASES, Case
from torch import nn

import paceline
from paceline.links.group import Group
from paceline.training.data.batch import Batch
from paceline.training.recipes.recipe import Recipe
from ranks import Variant, alternate, timed

ALONE = "alone"
SYNC_EVERY, DELAY = 5, 1  # of a round
_NUM_WARM_UP, _NUM_BLOCKS = 3, 4
_NUM_ROUNDS = {"0.1m": 10, "1m": 3, "10m": 1}  # in a block
_CODECS = (None, "dynamic8", "dynamic4")


def measure(group: Group, quick: bool, part: str) -> dict[str, Any]:
    """Return the seconds of the steps of all variants, in blocks of rounds that take turns."""
    case = CASES[part]
    recipe = getattr(sized_gpt, case.model)()
    variants = [
        Variant(name, timed(step, _NUM_WARM_UP if name == ALONE else 0), group.world_size)
        for name, step in _variants(recipe, case)
    ]
    for one in variants:
        one.run(_NUM_WARM_UP)
    num_rounds = 1 if quick else _NUM_ROUNDS[part]
    blocks = alternate(variants, group, 1 if quick else _NUM_BLOCKS, num_rounds * SYNC_EVERY)
    return {name: [sum(block) / len(block) for block in own] for name, own in blocks.items()}


def _variants(recipe: Recipe, case: Case) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the names of the variants, and what takes a step of each."""
    wraps: dict[str, Callable[[nn.Module], nn.Module]] = {ALONE: lambda model: model}
    for size in (1, 25):
        wraps[f"DDP {size} MB"] = partial(distributed, size)
    wraps["DDP, fp16 hook"] = half
    for codec in ("dynamic8", "dynamic4"):
        wraps[f"allreduce, {codec}"] = partial(encoded, codec)
    for name, wrap in wraps.items():
        yield name, _Trainee(recipe, case, wrap).step
    for codec, delay in product(_CODECS, (0, DELAY)):
        trainee = _Trainee(recipe, case, lambda model: model)
        trainee.updates = paceline.LocalUpdates(
            trainee.model, trainee.optimizer, SYNC_EVERY, codec=codec, delay=delay
        )
        yield local_name(codec, is_delayed=delay > 0), trainee.step


def local_name(codec: str | None, *, is_delayed: bool) -> str:
    """Return the name of local updates that encode like this."""
    return f"local{', delay' if is_delayed else ''}, {codec or 'float32'}"


class _Trainee:
    """A model in training, as anybody writes it in PyTorch."""

    def __init__(self, recipe: Recipe, case: Case, wrap: Callable[[nn.Module], nn.Module]) -> None:
        torch.manual_seed(0)
        self.model = recipe.model()
        self._parallel, self._loss = wrap(self.model), recipe.loss
        self.optimizer = torch.optim.AdamW(self.model.parameters(), case.learning_rate)
        rows = recipe.samples.__getitems__(range(case.batch_size))
        self._inputs, self._targets = Batch.of(rows)
        self.updates: paceline.LocalUpdates | None = None

    def step(self) -> None:
        """Go forward and backward, and update the weights."""
        self._loss(self._parallel(self._inputs), self._targets).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
