"""Look up recipes by name: a built-in model with its data, or "package.module:factory"."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, lru_cache, partial
from itertools import chain, count
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from paceline.core.defaults import usual_for
from paceline.core.error_lines import blamed
from paceline.core.errors import InvalidInput
from paceline.core.importing import imported
from paceline.core.workload import Workload
from paceline.training.data.dataset import Dataset
from paceline.training.data.spec import load
from paceline.training.models.describe import describe
from paceline.training.models.factory import ANY_WIDTH, MLP_WIDTHS, find
from paceline.training.models.layers import copied, duplicate
from paceline.training.recipes.losses import (
    accuracy,
    bits_per_byte,
    class_loss,
    next_token_loss,
)
from paceline.training.recipes.recipe import NAMELESS, Loss, Recipe, new_model

_Found = TypeVar("_Found")
_TEXTS = ("text", "masked-text")  # data sets with bytes as tokens
_GIVEN = "given-recipe"  # prefix of the temporary names that `given` makes
_given: dict[str, Recipe] = {}


@contextmanager
def given(recipe: Recipe) -> Iterator[str]:
    """Register a recipe object under a temporary name for this process and its forks.

    The name is like "given-recipe:NAME"; its hyphen prevents confusion with "package.module:name".
    """
    kind = recipe.name or getattr(recipe.model, "__name__", "").removeprefix("<lambda>")
    kind = re.sub(r"[^\w.-]+", "-", kind).strip("-") or "model"
    names = (f"{_GIVEN}:{kind}{suffix}" for suffix in chain([""], map("-{}".format, count(2))))
    name = next(one for one in names if one not in _given)
    _given[name] = recipe
    try:
        yield name
    finally:
        del _given[name]


def is_given(name: str) -> bool:
    """Return whether `given` has registered a recipe under the temporary name `name`."""
    return name in _given


def recipe_of(model: str, data: str | None, seed: int, loaded: Dataset | None = None) -> Recipe:
    """Look up a recipe by model name; `data` overrides the model's usual data set.

    `model`: a built-in name, or "package.module:name" for a user's recipe, model class, or function
    that returns a recipe or model. `seed` determines the split into training and test samples.
    `loaded`: the data set, if already loaded. Raises InvalidInput for an unknown name, or if the
    model does not fit the data.
    """
    found = own_recipe(model)
    if found is not None:
        if data is not None:
            problem = f"cannot be combined with recipe {found.name}, which includes its data"
            raise InvalidInput("data", problem)
        return found
    architecture, is_any_width = find(model), model == ANY_WIDTH
    if loaded is None:
        shape = None if is_any_width else architecture.input_shape
        loaded = load(data or usual_for(model).data, shape, seed)
    if is_any_width:  # the first layer has one input for each value of a sample
        widths = prod(loaded.sample_shape), *MLP_WIDTHS[1:]
        architecture = find("-".join([ANY_WIDTH, *map(str, widths)]))
    num_classes = None if architecture.num_classes is None else loaded.num_classes
    build = partial(architecture.build, num_classes)
    return replace(recipe_of_data(loaded), name=model, model=build)


def own_recipe(model: str) -> Recipe | None:
    """Return the user's recipe named `model`; None if this name belongs to a model.

    Raises InvalidInput if the user's factory fails, or returns neither a recipe nor a model.
    """
    if model in _given:
        return replace(_given[model], name=_given[model].name or NAMELESS)
    if model.startswith(f"{_GIVEN}:"):
        hint = "call paceline.train(recipe, resume=FOLDER) in that program"
        raise InvalidInput(model, "is known only to the program that started the run", hint=hint)
    found = _of_user(model)
    return None if found is None else replace(found, name=found.name or model)


def takes_any_data(model: str) -> bool:
    """Return whether a model accepts any float data set; recipes and language models do not."""
    return own_recipe(model) is None and find(model).input_dtype.is_floating_point


@cache
def _of_user(name: str) -> Recipe | None:
    if ":" not in name:
        return None
    found = imported("model", name)
    if isinstance(found, Recipe):
        return found
    is_class = isinstance(found, type) and issubclass(found, nn.Module)
    if is_class or isinstance(found, nn.Module) or not callable(found):
        return None  # a model, or an object for which `find` raises InvalidInput
    try:
        with torch.random.fork_rng(devices=[]):
            made = found()
    except InvalidInput as error:
        if error.field == NAMELESS:  # raised by Recipe, which does not know `name`
            raise InvalidInput.of(error.message_for(name)) from error
        raise InvalidInput(name, str(error)) from error
    except (Exception, SystemExit) as error:
        raise InvalidInput(name, f"the factory failed: {blamed(error)}") from error
    if not isinstance(made, Recipe | nn.Module):
        kind = type(made).__name__
        raise InvalidInput(name, f"returned {kind}, not a paceline.Recipe or torch.nn.Module")
    return made if isinstance(made, Recipe) else None


def recipe_of_data(data: Dataset) -> Recipe:
    """Return a recipe for `data`, with a matching loss and score but an empty model."""
    inputs, _ = data.train.__getitems__([0])
    loss: Loss = class_loss
    score: Loss | None = accuracy
    if not inputs.is_floating_point():
        of_bytes = data.name.partition(":")[0] in _TEXTS
        loss, score = next_token_loss, bits_per_byte if of_bytes else None
    return Recipe(
        model=nn.Module,
        train=data.train,
        test=data.test,
        loss=loss,
        score=score,
        num_classes=data.num_classes,
    )


def workload_of(
    model: str | nn.Module | Recipe, batch_size: int, input_shape: tuple[int, ...] | None = None
) -> Workload:
    """Describe a training step of a model or recipe, given as an object or by name.

    `input_shape`: shape of one sample. Built-in models have a default shape; for a recipe,
    `input_shape` must be None. Raises InvalidInput if the shape is unknown or does not fit.
    """
    if isinstance(model, nn.Module):
        return describe(model, _example(batch_size, input_shape))
    recipe = own_recipe(model) if isinstance(model, str) else model
    if recipe is None:
        assert isinstance(model, str)
        return (_of_name if ":" in model else _of_built_in)(model, batch_size, input_shape)
    if input_shape is not None:
        raise InvalidInput("input_shape", "cannot be combined with a recipe, which defines it")
    own = partial(describe, name=recipe.name or NAMELESS)
    described = tried_with(recipe, own, num_samples=batch_size)
    return replace(described, target_nbytes=recipe.target_nbytes(batch_size))


def _of_name(model: str, batch_size: int, input_shape: tuple[int, ...] | None) -> Workload:
    return tried_with(model, partial(describe, name=model), input_shape, batch_size)


# Cached, because plans need the same workloads repeatedly; built-in models never change.
_of_built_in = lru_cache(maxsize=256)(_of_name)


def tried_with(
    model: str | nn.Module | Recipe,
    attempt: Callable[[nn.Module, Any], _Found],
    input_shape: tuple[int, ...] | None = None,
    num_samples: int = 2,
) -> _Found:
    """Call `attempt(model, inputs)` with a new model in training mode; return its result.

    If `model` is an nn.Module, `attempt` gets a copy. The model and inputs are on the meta device.
    If `attempt` fails for a user's model, it is called again with model and inputs on the CPU, and
    errors of this call are raised. `input_shape`: shape of one sample, required for an nn.Module.
    `num_samples`: batch size of the inputs, 2 by default, because batch norm needs two samples.
    """
    recipe = own_recipe(model) if isinstance(model, str) else model

    def run(device: str) -> _Found:
        with torch.device(device):
            if isinstance(recipe, nn.Module):
                own = duplicate(recipe, partial(copied, device=torch.device(device)))
                example: Any = _example(num_samples, input_shape)
            elif recipe is not None:
                own, example = new_model(recipe), recipe.example(num_samples)
            else:
                architecture = find(str(model))
                own, shape = architecture.build(), input_shape or architecture.input_shape
                example = _example(num_samples, shape, architecture.input_dtype)
            return attempt(own.train(), tree_map(lambda leaf: leaf.to(device), example))

    with torch.random.fork_rng(devices=[]):  # leave the program's random numbers unchanged
        try:
            return run("meta")
        except Exception:  # a user's model may read tensor values, which meta tensors lack
            if isinstance(model, str) and ":" not in model:
                raise
            return run("cpu")


def _example(
    batch_size: int, shape: tuple[int, ...] | None, dtype: torch.dtype = torch.float32
) -> Tensor:
    if shape is None:
        hint = "for example 3x224x224"
        raise InvalidInput("input_shape", "is required for your own model", hint=hint)
    return torch.zeros(batch_size, *shape, dtype=dtype)
