"""Recipes by name: built-in models with their data, and the user's package.module:factory."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from paceline.core.errors import InvalidInput, first_line
from paceline.core.workload import Workload
from paceline.data.dataset import Dataset
from paceline.models.describe import describe
from paceline.models.factory import architected, find, imported
from paceline.recipes.classification import accuracy, class_loss, label_loss, precision_at_1
from paceline.recipes.recipe import Recipe

USUAL_DATA = "digits"
_given: dict[str, Recipe] = {}


@contextmanager
def given(recipe: Recipe) -> Iterator[str]:
    """Yield a name by which `recipe_of` knows a recipe, here and in processes forked from here."""
    name = f"recipe {recipe.name or type(recipe.model()).__name__}"
    _given[name] = recipe
    try:
        yield name
    finally:
        del _given[name]


def recipe_of(model: str, data: str | None, seed: int, loaded: Dataset | None = None) -> Recipe:
    """Return the recipe of a model's name, with the data of that spec or its own.

    `model` is a built-in name or "package.module:factory": a recipe, or a function or class that
    returns a recipe or a model when called without arguments. `seed` decides how data are split.
    `loaded`: the data of the spec, where they are in memory already; a recipe has data of its own.
    Raises InvalidInput if there is none of that name, or model and data do not fit each other.
    """
    found = _given.get(model) or _of_user(model)
    if found is not None:
        if data is not None:
            raise InvalidInput(
                f"data: {model} is a recipe, which has data of its own; leave it out"
            )
        return replace(found, name=found.name or model)
    loaded, name, num_classes, _ = architected(model, data or USUAL_DATA, seed, loaded)
    return replace(recipe_of_data(loaded), name=model, model=partial(find(name).build, num_classes))


def _of_user(name: str) -> Recipe | None:
    """Return the recipe of package.module:factory, or None if it makes a model, or is built in."""
    if ":" not in name:
        return None
    found = imported(name)
    if isinstance(found, Recipe):
        return found
    is_class = isinstance(found, type) and issubclass(found, nn.Module)
    if is_class or isinstance(found, nn.Module) or not callable(found):
        return None  # what is wrong with it, `find` says
    try:
        with torch.random.fork_rng(devices=[]):
            made = found()
    except (Exception, SystemExit) as error:
        raise InvalidInput(f"{name}: calling it failed: {first_line(error)}") from error
    if not isinstance(made, Recipe | nn.Module):
        raise InvalidInput(
            f"{name}: it returned {type(made).__name__}, not a paceline.Recipe or torch.nn.Module"
        )
    return made if isinstance(made, Recipe) else None


def recipe_of_data(data: Dataset) -> Recipe:
    """Return a recipe of the data without its model."""
    _, targets = data.train.__getitems__([0])
    has_labels = targets.dtype == torch.bool
    return Recipe(
        model=nn.Module,
        train=data.train,
        test=data.test,
        loss=label_loss if has_labels else class_loss,
        score=precision_at_1 if has_labels else accuracy,
        num_classes=data.num_classes,
    )


def workload_of(
    model: str | nn.Module | Recipe, batch_size: int, input_shape: tuple[int, ...] | None = None
) -> Workload:
    """Describe a step of a model or a recipe, or of the one of that name.

    `input_shape` is that of one sample of floats; recipes and built-in models know theirs.
    InvalidInput if it is not known, or does not fit.
    """
    recipe = _recipe(model)
    if recipe is not None:
        if input_shape is not None:
            raise InvalidInput("input_shape: the recipe's data say it; leave it out")
        return describe(recipe.model(), recipe.example(batch_size), recipe.name)
    if isinstance(model, nn.Module):
        name, built, shape = type(model).__name__, model, input_shape
    else:
        assert isinstance(model, str)
        architecture = find(model)
        name, shape = model, input_shape or architecture.input_shape
        # A factory of the user's may compute with the tensors that it makes.
        with torch.device("meta" if architecture.num_classes else "cpu"):
            built = architecture.build(None)
    if shape is None:
        raise InvalidInput(
            f"input_shape: model {name} does not say it; write for example 3x224x224"
        )
    return describe(built, torch.zeros(batch_size, *shape), name)


def _recipe(model: Any) -> Recipe | None:
    if isinstance(model, Recipe):
        return replace(model, name=model.name or "the recipe")
    if isinstance(model, str):
        found = _given.get(model) or _of_user(model)
        return None if found is None else replace(found, name=found.name or model)
    return None
