"""A model for a data set, as every kind of run builds it."""

from typing import NamedTuple

import torch
from torch import nn

from paceline.data import load
from paceline.data.dataset import Dataset
from paceline.models import find
from paceline.models.fitting import ANY_WIDTH, fitting
from paceline.training.objective import check_outputs


class Fitted(NamedTuple):
    """A model in training mode, its data, and what else builds the same model in another process.

    `name` and `num_classes` are for `paceline.models.find`; `input_shape` is what the data were
    asked for, None if they may have their own.
    """

    model: nn.Module
    data: Dataset
    name: str
    num_classes: int | None
    input_shape: tuple[int, ...] | None


class Architected(NamedTuple):
    """Data, and what builds a model for them in any process; the fields are those of `Fitted`."""

    data: Dataset
    name: str
    num_classes: int | None
    input_shape: tuple[int, ...] | None

    def build(self) -> nn.Module:
        """Build the model, with the random numbers that are next."""
        return find(self.name).build(self.num_classes)


def architected(model: str, data: str, seed: int) -> Architected:
    """Load the data, and find which model fits their samples and classes."""
    shape = None if model == ANY_WIDTH else find(model).input_shape
    loaded = load(data, shape, seed)
    name = fitting(model, loaded.sample_shape)
    num_classes = None if find(name).num_classes is None else loaded.num_classes
    return Architected(loaded, name, num_classes, shape)


def fitted(model: str, data: str, seed: int) -> Fitted:
    """Load the data and build the model for them. InvalidInput if they do not fit each other."""
    found = architected(model, data, seed)
    torch.manual_seed(seed)
    built = found.build()
    check_outputs(built, found.data, model)
    return Fitted(built.train(), *found)
