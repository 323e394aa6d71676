"""A worker's batches: samples of a recipe by their rows, and the loss of a model on them."""

from contextlib import nullcontext
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.error_lines import blamed
from paceline.core.errors import InvalidInput, PacelineError, first_line
from paceline.exchange.step import Learning
from paceline.training.data.batch import Batch, call
from paceline.training.data.dataset import TensorSamples
from paceline.training.recipes.recipe import Recipe, described, learnable_loss

_MOST_NAMED = 3  # samples in an error


class BatchReader:
    """Reads batches of a recipe's training samples by their rows.

    Tensors in memory are read by several threads at once, any other data set by one at a time, as
    a DataLoader does.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.samples, self._name = recipe.samples, recipe.name
        self._is_tensors = isinstance(recipe.samples, TensorSamples)
        self._reading = nullcontext() if self._is_tensors else Lock()

    def read(self, rows: Tensor) -> Any:
        """Return the batch of these rows (N,); InvalidInput names samples that cannot be read."""
        indices: Any = rows if self._is_tensors else rows.tolist()
        try:
            with self._reading:
                return self.samples.__getitems__(indices)
        except PacelineError:
            raise
        except Exception as error:
            named = ", ".join(map(str, rows[:_MOST_NAMED].tolist()))
            more = ", ..." if len(rows) > _MOST_NAMED else ""
            raise InvalidInput(
                self._name, f"its data cannot be read at samples {named}{more}: {first_line(error)}"
            ) from error


def loss_of(
    model: nn.Module, batch: Batch, learning: Learning, name: str, device: torch.device
) -> Tensor:
    """Return the mean loss of a batch, whose gradients can be computed.

    `name` is the recipe's. Raises InvalidInput if the model or the loss fails, or the loss is not
    one number that depends on the model.
    """
    inputs, targets = batch
    with learning.autocast(device):
        try:
            outputs = call(model, inputs)
        except Exception as error:
            raise InvalidInput(
                f"model {name}", f"fails on a batch, {described(inputs)}: {blamed(error)}"
            ) from error
        return learnable_loss(name, learning.loss, outputs, targets)
