"""Look up models by name."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.core.error_lines import blaming
from paceline.core.errors import InvalidInput
from paceline.core.importing import FORM, imported
from paceline.core.names import did_you_mean
from paceline.training.models import networks, transformers
from paceline.training.models.inception import GoogLeNet, InceptionV3
from paceline.training.models.layers import require_trainable

MLP_WIDTHS = (54, 512, 512, 512, 512, 512, 2)  # for covtype data (Ma, Rusu et al. 2020, table II)
_WIDTHS = re.compile(r"(?:sigmoid-)?mlp((?:-\d+)+)")
# The four networks of Ma, Rusu et al. 2020, with the hidden layers of section VII-A.
_SIGMOID_MLPS = {
    "covtype-mlp": (54, *(512,) * 6, 2),
    "w8a-mlp": (300, *(512,) * 8, 2),
    "delicious-mlp": (500, *(512,) * 8, 983),
    "real-sim-mlp": (20_958, *(512,) * 4, 2),
}


@dataclass(frozen=True)
class Architecture:
    """A model that can be built, with the shape, type and classes of its samples.

    `make(count)` returns a new model with `count` classes and random weights. `input_shape`: shape
    of one sample. A language model also accepts shorter samples, and has its vocabulary size in
    `num_classes`. For user factories, `input_shape` and `num_classes` are None.
    """

    make: Callable[[Any], nn.Module]
    input_shape: tuple[int, ...] | None
    num_classes: int | None
    input_dtype: torch.dtype = torch.float32

    def build(self, num_classes: int | None = None) -> nn.Module:
        """Return a new model with `num_classes` classes; None: the default number.

        User factories ignore `num_classes`. Raises InvalidInput if a user's factory fails or
        returns no trainable model.
        """
        return self.make(num_classes or self.num_classes)


def _gpts(
    name: str, make: Callable[..., nn.Module], context: int, vocabulary: int = 256
) -> dict[str, Architecture]:
    """Map `name` to a GPT with tied weights, and NAME-untied to one with untied weights."""
    shape = (context,), vocabulary, torch.int64
    untied = partial(make, tied=False)
    return {name: Architecture(make, *shape), f"{name}-untied": Architecture(untied, *shape)}


_IMAGENET = (3, 224, 224)
_BUILT_IN = {
    "lenet5": Architecture(networks.LeNet5, (1, 32, 32), 10),
    "alexnet": Architecture(networks.AlexNet, (3, 227, 227), 1000),
    "vgg16": Architecture(networks.VGG16, _IMAGENET, 1000),
    "googlenet": Architecture(GoogLeNet, _IMAGENET, 1000),
    "inception-v3": Architecture(InceptionV3, (3, 299, 299), 1000),
    "resnet18": Architecture(networks.resnet18, _IMAGENET, 1000),
    "resnet50": Architecture(networks.resnet50, _IMAGENET, 1000),
    "vit": Architecture(transformers.vit, (3, 32, 32), 10),
    "vit-b-16": Architecture(transformers.ViT, _IMAGENET, 1000),
    **_gpts("gpt", transformers.gpt, 256),
    **_gpts("gpt-1m", transformers.gpt_1m, 256),
    **_gpts("gpt-10m", transformers.gpt_10m, 256),
    **_gpts("gpt-30m", transformers.gpt_30m, 512),
    **_gpts("gpt2", transformers.GPT, 1024, 50_257),
}
ANY_WIDTH = "mlp"
_COMMON = "lenet5, alexnet, vgg16, resnet18, resnet50, vit, gpt, gpt2, mlp"


def names() -> tuple[str, ...]:
    """List the names of the built-in models."""
    return (*_BUILT_IN, ANY_WIDTH, *_SIGMOID_MLPS)


def find(name: str) -> Architecture:
    """Look up a model by its built-in name, or as "package.module:factory" of a user.

    "mlp-54-512-2" is a multilayer perceptron of these widths, with ReLU and biases.
    "sigmoid-mlp-54-512-2" has sigmoids and no biases. A factory is a function or class that returns
    an nn.Module when called without arguments. The factory's Python module may be in the current
    directory, which is added to `sys.path`. Raises InvalidInput for an unknown name, module or
    attribute, and if the import fails.
    """
    if ":" in name:
        return _of_user(name)
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    widths: tuple[int, ...] | None = _SIGMOID_MLPS.get(name)
    if match := _WIDTHS.fullmatch(name):
        widths = tuple(map(int, match[1][1:].split("-")))
    if name == ANY_WIDTH:
        widths = MLP_WIDTHS
    if widths:
        if len(widths) < 2 or min(widths) < 1:
            raise InvalidInput("model", "must have at least two positive widths", got=name)
        is_sigmoid = name in _SIGMOID_MLPS or name.startswith("sigmoid-")
        network, hidden = networks.SigmoidMLP if is_sigmoid else networks.MLP, widths[:-1]
        return Architecture(lambda n: network((*hidden, n)), (widths[0],), widths[-1])
    nearest = did_you_mean(name, names())
    if Path(f"{name}.py").is_file():
        nearest = f"for a model in {name}.py, write {name}:FUNCTION;"
    hint = f"{nearest} Built-in: {_COMMON}, ... (docs/models.md); your own: {FORM}".strip()
    raise InvalidInput("model", "is not known", got=name, hint=hint)


def _of_user(name: str) -> Architecture:
    factory = imported("model", name)
    if isinstance(factory, nn.Module) or not callable(factory):
        problem = "must be a function or class that returns a model or recipe"
        raise InvalidInput(name, problem, got=type(factory).__name__)

    def make(_: int | None) -> nn.Module:
        with blaming(name, "the factory failed"):
            model = factory()
        return require_trainable(name, model)

    return Architecture(make, None, None)
