"""Models by name: the built-in ones, and any factory of the user's as package.module:factory."""

import importlib
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from torch import nn

from paceline.core.errors import InvalidInput
from paceline.models import resnet
from paceline.models.alexnet import AlexNet
from paceline.models.googlenet import GoogLeNet
from paceline.models.inception import InceptionV3
from paceline.models.lenet import LeNet5
from paceline.models.mlp import MLP, SigmoidMLP
from paceline.models.vgg import VGG16

_FORM = "package.module:factory"
# The network for covtype that Ma, Rusu et al. 2020 print in Table II.
_MLP_WIDTHS = (54, 512, 512, 512, 512, 512, 2)
_WIDTHS = re.compile(r"(?:sigmoid-)?mlp((?:-\d+)+)")
# Their four networks, with as many hidden layers as section VII-A says.
_SIGMOID_MLPS = {
    "covtype-mlp": (54, *(512,) * 6, 2),
    "w8a-mlp": (300, *(512,) * 8, 2),
    "delicious-mlp": (500, *(512,) * 8, 983),
    "real-sim-mlp": (20_958, *(512,) * 4, 2),
}

_IMAGENET = (3, 224, 224)
_BUILT_IN: dict[str, tuple[Callable[[int], nn.Module], tuple[int, ...], int]] = {
    "lenet5": (LeNet5, (1, 32, 32), 10),
    "alexnet": (AlexNet, (3, 227, 227), 1000),
    "vgg16": (VGG16, _IMAGENET, 1000),
    "googlenet": (GoogLeNet, _IMAGENET, 1000),
    "inception-v3": (InceptionV3, (3, 299, 299), 1000),
    "resnet18": (resnet.resnet18, _IMAGENET, 1000),
    "resnet50": (resnet.resnet50, _IMAGENET, 1000),
    "resnet101": (resnet.resnet101, _IMAGENET, 1000),
    "resnet110": (resnet.resnet110, (3, 32, 32), 10),
    "resnet152": (resnet.resnet152, _IMAGENET, 1000),
}


@dataclass(frozen=True)
class Architecture:
    """A kind of model that can be built.

    `build(num_classes)` returns a new model with random weights; None asks for the usual number of
    classes, and a factory of the user's has its own number whatever is asked. `input_shape` is the
    shape of one sample, `num_classes` the usual number of classes; both are None where only the
    user's code knows them. `build` raises InvalidInput for a number of classes below 1, and if the
    user's factory fails or returns nothing that can be trained.
    """

    name: str
    build: Callable[[int | None], nn.Module]
    input_shape: tuple[int, ...] | None
    num_classes: int | None


def names() -> tuple[str, ...]:
    """Return the names of the built-in models."""
    return (*_BUILT_IN, "mlp", *_SIGMOID_MLPS)


def find(name: str) -> Architecture:
    """Return the architecture of a built-in name or of the user's own `package.module:factory`.

    "mlp-54-512-2" is a multilayer perceptron of these widths, with rectifiers and biases;
    "sigmoid-mlp-54-512-2" has sigmoids and no biases. A factory is any function or class
    that returns an nn.Module when called without arguments; its module is imported as with
    `python -m`, so it may be in the current directory, which goes onto `sys.path`.
    Raises InvalidInput if there is no such name, module or attribute, or the import fails.
    """
    if ":" in name:
        return _of_user(name)
    if name in _BUILT_IN:
        make, input_shape, num_classes = _BUILT_IN[name]
        return Architecture(name, _builder(make, num_classes), input_shape, num_classes)
    match = _WIDTHS.fullmatch(name)
    if name == "mlp" or match:
        widths = tuple(map(int, match[1][1:].split("-"))) if match else _MLP_WIDTHS
        return _perceptron(name, widths, SigmoidMLP if name.startswith("sigmoid-") else MLP)
    if name in _SIGMOID_MLPS:
        return _perceptron(name, _SIGMOID_MLPS[name], SigmoidMLP)
    close = get_close_matches(name.lower(), names(), n=1)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    raise InvalidInput(
        f"no model is called {name!r}{hint} Known are {', '.join(names())}, mlp-WIDTH-...-WIDTH, "
        f"sigmoid-mlp-WIDTH-...-WIDTH, and your own as {_FORM}"
    )


def _builder(make: Callable[[int], nn.Module], usual: int) -> Callable[[int | None], nn.Module]:
    def build(num_classes: int | None) -> nn.Module:
        if num_classes is not None and num_classes < 1:
            raise InvalidInput(f"a model needs at least 1 class, not {num_classes}")
        return make(usual if num_classes is None else num_classes)

    return build


def _perceptron(
    name: str, widths: tuple[int, ...], kind: type[MLP] | type[SigmoidMLP]
) -> Architecture:
    MLP.check(widths)

    def make(num_classes: int) -> nn.Module:
        return kind((*widths[:-1], num_classes))

    return Architecture(name, _builder(make, widths[-1]), (widths[0],), widths[-1])


def _of_user(name: str) -> Architecture:
    module, _, attribute = name.partition(":")
    parts = [*module.split("."), *attribute.split(".")]
    if not all(part.isidentifier() for part in parts):
        raise InvalidInput(f"{name!r} is not of the form {_FORM}")
    factory = _attribute(_import(module, name), attribute, name)
    if isinstance(factory, nn.Module) or not callable(factory):
        raise InvalidInput(
            f"{name}: {attribute} is of type {type(factory).__name__}; it must be a function or "
            "class that returns a model when called"
        )

    def build(num_classes: int | None) -> nn.Module:
        # The factory takes no arguments: whether its model fits the data shows when it runs.
        return _called(factory, name)

    return Architecture(name, build, None, None)


def _import(module: str, name: str) -> object:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{module}.".startswith(f"{missing}."):
            raise InvalidInput(
                f"{name}: there is no module {missing!r} in {here} or among the installed packages"
            ) from error
        raise InvalidInput(f"{name}: importing {module!r} failed: {_one_line(error)}") from error


def _attribute(module: object, attribute: str, name: str) -> Any:
    found = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            public = [key for key in dir(found) if not key.startswith("_")]
            close = get_close_matches(part, public, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise InvalidInput(f"{name}: the module has no attribute {attribute!r}{hint}")
        found = getattr(found, part)
    return found


def _called(factory: Callable[[], object], name: str) -> nn.Module:
    try:
        model = factory()
    except (Exception, SystemExit) as error:
        raise InvalidInput(f"{name}: calling it failed: {_one_line(error)}") from error
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"{name}: it returned {type(model).__name__}, not a torch.nn.Module")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InvalidInput(f"{name}: the model has no trainable parameters")
    return model


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
