"""Look up models by name, and fit them to a data set."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from paceline.core.defaults import usual_for
from paceline.core.error_lines import blamed
from paceline.core.errors import InvalidInput
from paceline.core.importing import FORM, imported
from paceline.core.names import did_you_mean
from paceline.training.data import load
from paceline.training.data.dataset import Dataset
from paceline.training.models import networks, transformers
from paceline.training.models.inception import GoogLeNet, InceptionV3
from paceline.training.models.layers import require_trainable

_MLP_WIDTHS = (54, 512, 512, 512, 512, 512, 2)  # for covtype (Ma, Rusu et al. 2020, table II)
_WIDTHS = re.compile(r"(?:sigmoid-)?mlp((?:-\d+)+)")
# The four networks of Ma, Rusu et al. 2020, with the hidden layers of section VII-A.
_SIGMOID_MLPS = {
    "covtype-mlp": (54, *(512,) * 6, 2),
    "w8a-mlp": (300, *(512,) * 8, 2),
    "delicious-mlp": (500, *(512,) * 8, 983),
    "real-sim-mlp": (20_958, *(512,) * 4, 2),
}


class _BuiltIn(NamedTuple):
    """A built-in model's properties; `make(num_classes)` builds the model."""

    make: Callable[[int], nn.Module]
    input_shape: tuple[int, ...]
    num_classes: int
    input_dtype: torch.dtype = torch.float32


def _of_tokens(make: Callable[[int], nn.Module], context: int, vocabulary: int) -> _BuiltIn:
    return _BuiltIn(make, (context,), vocabulary, torch.int64)


def _gpts(
    name: str, make: Callable[..., nn.Module], context: int, vocabulary: int = 256
) -> dict[str, _BuiltIn]:
    """Return two entries: a GPT with tied weights, and the same GPT with untied weights."""
    untied = partial(make, tied=False)
    return {
        name: _of_tokens(make, context, vocabulary),
        f"{name}-untied": _of_tokens(untied, context, vocabulary),
    }


_IMAGENET = (3, 224, 224)
_BUILT_IN = {
    "lenet5": _BuiltIn(networks.LeNet5, (1, 32, 32), 10),
    "alexnet": _BuiltIn(networks.AlexNet, (3, 227, 227), 1000),
    "vgg16": _BuiltIn(networks.VGG16, _IMAGENET, 1000),
    "googlenet": _BuiltIn(GoogLeNet, _IMAGENET, 1000),
    "inception-v3": _BuiltIn(InceptionV3, (3, 299, 299), 1000),
    "resnet18": _BuiltIn(networks.resnet18, _IMAGENET, 1000),
    "resnet50": _BuiltIn(networks.resnet50, _IMAGENET, 1000),
    "vit": _BuiltIn(transformers.vit, (3, 32, 32), 10),
    "vit-b-16": _BuiltIn(transformers.ViT, _IMAGENET, 1000),
    **_gpts("gpt", transformers.gpt, 256),
    **_gpts("gpt-1m", transformers.gpt_1m, 256),
    **_gpts("gpt-10m", transformers.gpt_10m, 256),
    **_gpts("gpt-30m", transformers.gpt_30m, 512),
    **_gpts("gpt2", transformers.GPT, 1024, 50_257),
}
ANY_WIDTH = "mlp"
_COMMON = "lenet5, alexnet, vgg16, resnet18, resnet50, vit, gpt, gpt2, mlp"


@dataclass(frozen=True)
class Architecture:
    """A model that can be built, with the properties of its samples.

    `build(count)` returns a new model with `count` classes and random weights. `build(None)`
    returns a model with `num_classes` classes. User factories ignore `count`. `build` raises
    InvalidInput for a number below 1, and if a user's factory fails or returns no trainable model.

    `input_shape`: shape of one sample. A language model also accepts shorter samples, and has its
    vocabulary size in `num_classes`. For user factories, `input_shape` and `num_classes` are None.
    """

    name: str
    build: Callable[[int | None], nn.Module]
    input_shape: tuple[int, ...] | None
    num_classes: int | None
    input_dtype: torch.dtype = torch.float32


def names() -> tuple[str, ...]:
    """List the names of the built-in models."""
    return (*_BUILT_IN, ANY_WIDTH, *_SIGMOID_MLPS)


def find(name: str) -> Architecture:
    """Look up a built-in name, or a user's `package.module:factory`.

    "mlp-54-512-2" is a multilayer perceptron of these widths, with ReLU and biases.
    "sigmoid-mlp-54-512-2" has sigmoids and no biases. A factory is a function or class that returns
    an nn.Module when called without arguments. The factory's Python module may be in the current
    directory, which is added to `sys.path`. Raises InvalidInput for an unknown name, module or
    attribute, and if the import fails.
    """
    if ":" in name:
        return _of_user(name)
    widths: tuple[int, ...] | None = _SIGMOID_MLPS.get(name)
    if match := _WIDTHS.fullmatch(name):
        widths = tuple(map(int, match[1][1:].split("-")))
    if name == ANY_WIDTH:
        widths = _MLP_WIDTHS
    if name in _BUILT_IN:
        found = _BUILT_IN[name]
    elif widths:
        networks.MLP.check(widths)
        is_sigmoid = name in _SIGMOID_MLPS or name.startswith("sigmoid-")
        network, hidden = networks.SigmoidMLP if is_sigmoid else networks.MLP, widths[:-1]
        found = _BuiltIn(lambda n: network((*hidden, n)), (widths[0],), widths[-1])
    else:
        nearest = did_you_mean(name, names()).strip("; .")
        if Path(f"{name}.py").is_file():
            nearest = f"a function of {name}.py is {name}:FUNCTION;"
        hint = f"{nearest} Built-in: {_COMMON}, ... (docs/models.md); your own: {FORM}".strip()
        raise InvalidInput("model", "is not known", got=name, hint=hint)

    def build(num_classes: int | None) -> nn.Module:
        if num_classes is not None and num_classes < 1:
            raise InvalidInput("num_classes", "must be at least 1", got=num_classes)
        return found.make(found.num_classes if num_classes is None else num_classes)

    return Architecture(name, build, *found[1:])


def _of_user(name: str) -> Architecture:
    factory = imported("model", name)
    if isinstance(factory, nn.Module) or not callable(factory):
        problem = "must be a function or class that returns a model or recipe"
        raise InvalidInput(name, problem, got=type(factory).__name__)

    def build(num_classes: int | None) -> nn.Module:
        try:
            model = factory()
        except (Exception, SystemExit) as error:
            raise InvalidInput(name, f"the factory failed: {blamed(error)}") from error
        return require_trainable(name, model)

    return Architecture(name, build, None, None)


def architected(
    model: str, data: str | None, seed: int, loaded: Dataset | None = None
) -> tuple[Dataset, str, int | None, tuple[int, ...] | None]:
    """Return the data set, the exact model name, the number of classes and the sample shape.

    A user's model defines the number of classes, so this number is None. For a user's model and
    for "mlp", the data defines the sample shape, so this shape is None. `data`: spec of the data
    set; None selects the model's usual data set. `loaded`: the data set, if already loaded.
    """
    data = data or usual_for(model).data
    shape = None if model == ANY_WIDTH else find(model).input_shape
    if loaded is None:
        loaded = load(data, shape, seed)
    name = model
    if model == ANY_WIDTH:  # one input for each value of a sample
        name = "-".join([ANY_WIDTH, *map(str, (prod(loaded.sample_shape), *_MLP_WIDTHS[1:]))])
    num_classes = None if find(name).num_classes is None else loaded.num_classes
    return loaded, name, num_classes, shape
