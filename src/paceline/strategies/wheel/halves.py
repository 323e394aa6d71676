"""The two halves of a model, which share its parameters (Du et al. 2017, section 3.1).

    scores = head(body(inputs))      # what the model computes, to the last bit

A process that trains one half has the other one, too, and does not use it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.core.errors import InvalidInput
from paceline.models.layers import ROOT, layers_of
from paceline.strategies.wheel.graph import halves_of

_DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Halves:
    """Body and head: the head begins with the layer `first`.

    `body_names` and `head_names` are their trainable parameters under the whole model's names, in
    the order of `body_parameters` and `head_parameters`. `crossing` is the shape of what the body
    hands on of one sample.
    """

    body: nn.Module
    head: nn.Module
    first: str
    body_names: tuple[str, ...]
    head_names: tuple[str, ...]
    crossing: tuple[int, ...] = ()

    @property
    def body_parameters(self) -> list[nn.Parameter]:
        """The parameters that the body trains."""
        return trainable(self.body)

    @property
    def head_parameters(self) -> list[nn.Parameter]:
        """The parameters that the head trains."""
        return trainable(self.head)


def trainable(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that are not frozen, shared ones once."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def cut(model: nn.Module, example: Tensor, first: str) -> Halves:
    """Return the halves of `model`: all that runs before the layer `first` is called, and the rest.

    `first` is the name of a layer as `layers_of` has it; what has no parameters and stands before
    it belongs to the body. The halves consist of the model's own modules: a module's mode, hooks,
    buffers and random numbers are its own wherever it is called from. What the modules around
    `first` compute themselves is as in training mode.

    `example` is a batch of two or more samples, on the model's device: halves and model must give
    the same scores of it. Parameters, buffers, modes and random numbers stay as they are. No other
    thread may use any model meanwhile. InvalidInput says which layer or connection stops it.
    """
    label = type(model).__name__
    _check(model, first, label)
    with _as_it_was(model):
        model.train()
        body, head = halves_of(model, first, label)
        _check_apart(model, body, head, f"head: {label} cannot be cut before {first!r}")
        crossing = _compared(model, body, head, example, f"head: {label}, cut before {first!r}")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    in_body, in_head = (
        tuple(names[id(parameter)] for parameter in trainable(half)) for half in (body, head)
    )
    return Halves(body, head, first, in_body, in_head, crossing)


def _check(model: nn.Module, first: str, label: str) -> None:
    layers = layers_of(model)
    names = [layer.name for layer in layers if layer.name != ROOT]
    if first not in names:
        raise InvalidInput(f"head: {label} has no layer {first!r}; choose one of {names}")
    parameters = [own for layer in layers for own in layer.parameters]
    of = parameters[0][1].dtype
    for name, parameter in parameters:
        if parameter.dtype != of or of not in _DTYPES:
            raise InvalidInput(
                f"parameter {name!r} of {label} is {parameter.dtype}; wheel trains models whose "
                "parameters are all float32, or all float64"
            )


@contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """Restore modes, buffers and random numbers afterwards."""
    modes = {module: module.training for module in model.modules()}
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    cuda = {p.device for p in model.parameters() if p.device.type == "cuda"}
    try:
        with torch.random.fork_rng(devices=list(cuda)):
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def _check_apart(model: nn.Module, body: nn.Module, head: nn.Module, refusal: str) -> None:
    """Refuse what both halves use: each would have its own."""
    tensors: dict[str, Tensor] = dict(model.named_parameters()) | dict(model.named_buffers())
    in_body, in_head = (
        {id(tensor) for tensor in (*half.parameters(), *half.buffers())} for half in (body, head)
    )
    for name, tensor in tensors.items():
        if id(tensor) in in_body & in_head:
            raise InvalidInput(f"{refusal}: {name!r} is used on both sides of the cut")
    if not trainable(body):
        raise InvalidInput(f"{refusal}: nothing before it is trained")


def _compared(
    model: nn.Module, body: nn.Module, head: nn.Module, example: Tensor, of: str
) -> tuple[int, ...]:
    """Return the shape of what crosses the cut, without samples, if the halves are the model.

    InvalidInput if they compute something else, or not what can be trained in halves.
    """
    before = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        torch.manual_seed(0)
        whole = model(example)
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)
        torch.manual_seed(0)
        activations = body(example)
        _check_activations(activations, len(example), of)
        scores = head(activations.detach().requires_grad_())
    except InvalidInput:
        raise
    except Exception as error:
        first_line = (str(error).strip().splitlines() or [""])[0]
        raise InvalidInput(
            f"{of}, cannot run on a batch of shape {tuple(example.shape)}: "
            f"{type(error).__name__}: {first_line}"
        ) from error
    if not isinstance(whole, Tensor):
        raise InvalidInput(f"{of}, returns {type(whole).__name__}, not a tensor of scores")
    if not _same(whole, scores):
        raise InvalidInput(
            f"{of}, computes something else than in one piece: its forward pass depends on more "
            "than its input and its modules"
        )
    return tuple(activations.shape[1:])


def _check_activations(activations: object, num_samples: int, of: str) -> None:
    if not isinstance(activations, Tensor) or activations.dtype not in _DTYPES:
        kind = activations.dtype if isinstance(activations, Tensor) else type(activations).__name__
        raise InvalidInput(f"{of}, would hand {kind} across the cut, not a float tensor")
    if not activations.requires_grad:
        raise InvalidInput(f"{of}, hands on what does not depend on the body's parameters")
    if activations.dim() == 0 or len(activations) != num_samples:
        raise InvalidInput(
            f"{of}, hands on shape {tuple(activations.shape)} of {num_samples} samples; the "
            "first dimension must be the samples'"
        )


def _same(whole: Tensor, scores: object) -> bool:
    if not isinstance(scores, Tensor) or whole.shape != scores.shape:
        return False
    if whole.device.type == "cpu":
        return torch.equal(whole.nan_to_num(), scores.nan_to_num())
    return torch.allclose(whole, scores, rtol=1e-3, atol=1e-5, equal_nan=True)
