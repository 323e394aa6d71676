"""Models and optimizers by name; models that fit a data set, or are described as a workload."""

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from math import prod
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from paceline.core.errors import InvalidInput, first_line
from paceline.core.workload import Workload
from paceline.data import load
from paceline.data.dataset import Dataset
from paceline.models import networks
from paceline.models.describe import describe
from paceline.models.inception import GoogLeNet, InceptionV3
from paceline.models.objective import check_outputs

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
    "lenet5": (networks.LeNet5, (1, 32, 32), 10),
    "alexnet": (networks.AlexNet, (3, 227, 227), 1000),
    "vgg16": (networks.VGG16, _IMAGENET, 1000),
    "googlenet": (GoogLeNet, _IMAGENET, 1000),
    "inception-v3": (InceptionV3, (3, 299, 299), 1000),
    "resnet18": (networks.resnet18, _IMAGENET, 1000),
    "resnet50": (networks.resnet50, _IMAGENET, 1000),
    "resnet101": (networks.resnet101, _IMAGENET, 1000),
    "resnet110": (networks.resnet110, (3, 32, 32), 10),
    "resnet152": (networks.resnet152, _IMAGENET, 1000),
}
ANY_WIDTH = "mlp"


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
    return (*_BUILT_IN, ANY_WIDTH, *_SIGMOID_MLPS)


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
    widths: tuple[int, ...] | None = _SIGMOID_MLPS.get(name)
    if match := _WIDTHS.fullmatch(name):
        widths = tuple(map(int, match[1][1:].split("-")))
    if name == ANY_WIDTH:
        widths = _MLP_WIDTHS
    if name in _BUILT_IN:
        make, input_shape, usual = _BUILT_IN[name]
    elif widths:
        networks.MLP.check(widths)
        is_sigmoid = name in _SIGMOID_MLPS or name.startswith("sigmoid-")
        network, hidden = networks.SigmoidMLP if is_sigmoid else networks.MLP, widths[:-1]
        make, input_shape, usual = lambda n: network((*hidden, n)), (widths[0],), widths[-1]
    else:
        close = get_close_matches(name.lower(), names(), n=1)
        hint = f"; did you mean {close[0]!r}?" if close else "."
        raise InvalidInput(
            f"no model is called {name!r}{hint} Known are {', '.join(names())}, "
            f"mlp-WIDTH-...-WIDTH, sigmoid-mlp-WIDTH-...-WIDTH, and your own as {_FORM}"
        )

    def build(num_classes: int | None) -> nn.Module:
        if num_classes is not None and num_classes < 1:
            raise InvalidInput(f"a model needs at least 1 class, not {num_classes}")
        return make(usual if num_classes is None else num_classes)

    return Architecture(name, build, input_shape, usual)


def _of_user(name: str) -> Architecture:
    factory = imported(name)
    if isinstance(factory, nn.Module) or not callable(factory):
        raise InvalidInput(
            f"{name}: {name.rpartition(':')[2]} is of type {type(factory).__name__}; it must be a "
            "function or class that returns a model or a recipe when called"
        )

    def build(num_classes: int | None) -> nn.Module:
        # The factory takes no arguments: whether its model fits the data shows when it runs.
        try:
            model = factory()
        except (Exception, SystemExit) as error:
            raise InvalidInput(f"{name}: calling it failed: {first_line(error)}") from error
        if not isinstance(model, nn.Module):
            raise InvalidInput(f"{name}: it returned {type(model).__name__}, not a torch.nn.Module")
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise InvalidInput(f"{name}: the model has no trainable parameters")
        return model

    return Architecture(name, build, None, None)


def imported(name: str) -> Any:
    """Return the object of the name package.module:factory; InvalidInput if there is none."""
    module, _, attribute = name.partition(":")
    parts = [*module.split("."), *attribute.split(".")]
    if not all(part.isidentifier() for part in parts):
        raise InvalidInput(f"{name!r} is not of the form {_FORM}")
    try:
        found = import_from_here(module)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{module}.".startswith(f"{missing}."):
            raise InvalidInput(
                f"{name}: there is no module {missing!r} in {Path.cwd()} or among the installed "
                "packages"
            ) from error
        raise InvalidInput(f"{name}: importing {module!r} failed: {first_line(error)}") from error
    try:
        return attrgetter(attribute)(found)
    except AttributeError as error:
        public = [key for key in dir(error.obj) if not key.startswith("_")]
        close = get_close_matches(str(error.name), public, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise InvalidInput(f"{name}: the module has no attribute {attribute!r}{hint}") from error


def import_from_here(module: str) -> ModuleType:
    """Import a module as `python -m` does: also from the current directory."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    return importlib.import_module(module)


class Fitted(NamedTuple):
    """A model in training mode, its data, and the arguments that build it in another process.

    `name` and `num_classes` are for `paceline.models.find`; `input_shape` is what the data were
    asked for, None if they may have their own.
    """

    model: nn.Module
    data: Dataset
    name: str
    num_classes: int | None
    input_shape: tuple[int, ...] | None


def architected(
    model: str, data: str, seed: int, loaded: Dataset | None = None
) -> tuple[Dataset, str, int | None, tuple[int, ...] | None]:
    """Load the data, and find a model for them: all fields of `Fitted` but `model`.

    `loaded`: these data, where they are in memory already.
    """
    shape = None if model == ANY_WIDTH else find(model).input_shape
    if loaded is None:
        loaded = load(data, shape, seed)
    name = model
    if model == ANY_WIDTH:  # has as many inputs as a sample has values
        name = "-".join([ANY_WIDTH, *map(str, (prod(loaded.sample_shape), *_MLP_WIDTHS[1:]))])
    num_classes = None if find(name).num_classes is None else loaded.num_classes
    return loaded, name, num_classes, shape


def fitted(model: str, data: str, seed: int) -> Fitted:
    """Load the data and build the model for them. InvalidInput if they do not fit each other."""
    loaded, name, num_classes, shape = architected(model, data, seed)
    torch.manual_seed(seed)
    built = find(name).build(num_classes)
    check_outputs(built, loaded, model)
    return Fitted(built.train(), loaded, name, num_classes, shape)


def workload_of(
    model: str | nn.Module, batch_size: int, input_shape: tuple[int, ...] | None
) -> Workload:
    """Describe a step of a model, or of the one that `find` has under that name.

    `input_shape` is that of one sample; built-in models know theirs. InvalidInput if it is not
    known, or does not fit.
    """
    if isinstance(model, nn.Module):
        name, built, shape = type(model).__name__, model, input_shape
    else:
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


OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def optimizer_of(name: str, learning_rate: float, momentum: float) -> OptimizerFactory:
    """Return a function that makes the optimizer of that name for some parameters.

    `name`: one of torch.optim, in any case, or "package.module:factory", which is called with the
    parameters and lr. It has to update the parameters in place, without another forward pass.
    Raises InvalidInput if there is none of that name, or if it has no momentum and one is given.
    """
    if ":" in name:
        module, _, attribute = name.partition(":")
        try:
            factory = getattr(import_from_here(module), attribute)
        except Exception as error:
            raise InvalidInput(f"optimizer: {name!r} cannot be imported: {error}") from error
        if not callable(factory):
            raise InvalidInput(f"optimizer: {name!r} is nothing that can be called")
    else:
        known: dict[str, Callable[..., torch.optim.Optimizer]] = {
            key.lower(): value
            for key, value in vars(torch.optim).items()
            if inspect.isclass(value)
            and issubclass(value, torch.optim.Optimizer)
            and value not in (torch.optim.Optimizer, torch.optim.LBFGS)  # which needs a closure
        }
        if name.lower() not in known:
            close = get_close_matches(name.lower(), known, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise InvalidInput(
                f"optimizer: {name!r} is not one that can be used; {hint}Known are "
                f"{', '.join(sorted(known))}, and your own as package.module:factory"
            )
        factory = known[name.lower()]
    options: dict[str, Any] = {"lr": learning_rate}
    if momentum:
        if "momentum" not in inspect.signature(factory).parameters:
            raise InvalidInput(f"momentum: optimizer {name} has none; leave it at 0")
        options["momentum"] = momentum
    return lambda parameters: factory(parameters, **options)
