"""Replicas of hogbatch's workers on CPU threads of this process."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from paceline.links.shared_memory import SharedTensors
from paceline.recipes.optimizers import OptimizerFactory
from paceline.recipes.recipe import Recipe
from paceline.strategies.hogbatch.replica import CpuReplica, tensors_of


@contextmanager
def on_threads(
    recipe: Recipe, make: OptimizerFactory, **options: Any
) -> Iterator[tuple[CpuReplica, dict[str, Tensor]]]:
    """A worker's replica of a new model, and the model that it shares."""
    memory = SharedTensors.of(tensors_of(recipe.model()), "a model")
    yield CpuReplica(recipe, memory.tensors, make, **{"worker": 0} | options), memory.tensors
    memory.close()
