"""Train a plain network on a few samples in C++, without the GIL.

In PyTorch, a batch of one sample takes about as long as a batch of sixteen: most of the time is
spent in Python and in PyTorch's dispatcher. Both hold the GIL, so the threads of a worker wait for
each other. `DenseChain` executes all layers in three calls: forward, backward and step. It supports
only chains of linear layers with ReLU or sigmoid, which this module detects.
"""

from collections.abc import Sequence
from functools import cached_property
from math import nan
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.optim import Optimizer

from paceline.exchange.step import Learning
from paceline.native import Activation, DenseChain
from paceline.training.data.dataset import IndexedSamples, TensorSamples
from paceline.training.recipes.losses import class_loss

MOST_SAMPLES = 256
# PyTorch is faster for batches above both limits: more than _FEW_SAMPLES samples, and more than
# _MOST_PRODUCTS products (samples times weights). Its overhead is 0.8 ms for two to eight layers.
_FEW_SAMPLES, _MOST_PRODUCTS = 4, 2**21

_ACTIVATIONS = {nn.ReLU: Activation.RELU, nn.Sigmoid: Activation.SIGMOID}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Fields of torch's SGD with the only values that `DenseChain` supports.
_PLAIN = {"weight_decay": 0, "dampening": 0, "nesterov": False, "maximize": False}
_MOMENTUM = "momentum_buffer"  # key in the state of torch's SGD
_Layer = tuple[nn.Linear, Activation]  # a linear layer with its activation
# A layer's weight and bias, their momentum buffers, and the activation.
_Tensors = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Activation]


class DenseThread:
    """Trains a model with `DenseChain` on a thread's batches of up to `most_samples` samples.

    PyTorch trains all other batches, so momentum buffers stay in the PyTorch optimizer's state.
    """

    def __init__(self, layers: list[_Layer], samples: TensorSamples, optimizer: Optimizer) -> None:
        self._layers, self._samples, self._optimizer = layers, samples, optimizer
        num_weights = sum(linear.weight.numel() for linear, _ in layers)
        self.most_samples = min(MOST_SAMPLES, max(_FEW_SAMPLES, _MOST_PRODUCTS // num_weights))
        optimizer.register_load_state_dict_post_hook(self._forget)

    @classmethod
    def of(
        cls, model: nn.Module, samples: IndexedSamples, optimizer: Optimizer, learning: Learning
    ) -> "DenseThread | None":
        """Create a trainer; return None if `DenseChain` does not support one of the arguments."""
        layers = _layers_of(model)
        if layers is None or not isinstance(samples, TensorSamples):
            return None
        if learning.loss is not class_loss or learning.bfloat16 or learning.clip_norm is not None:
            return None
        if samples.inputs.ndim != 2 and not _flattens_samples(_leaves_of(model)[0]):
            return None
        linears = [linear for linear, _ in layers]
        known = [one for linear in linears for one in linear.parameters()]
        if not _are_plain_samples(samples, linears) or not _is_plain_sgd(optimizer, known):
            return None
        return cls(layers, samples, optimizer)

    def forward(self, rows: Tensor) -> float:
        """Return the mean loss of a batch; NaN if PyTorch must train the batch instead."""
        if not 0 < len(rows) <= self.most_samples:
            return nan
        return self._chain.forward(rows)

    def backward(self) -> None:
        """Compute the gradients of the last batch."""
        self._chain.backward()

    def step(self) -> None:
        """Update the model with the gradients, at the optimizer's learning rate."""
        group = self._optimizer.param_groups[0]
        self._chain.step(float(group["lr"]), group["momentum"])

    @cached_property
    def _chain(self) -> DenseChain:
        layers: list[_Tensors] = []
        for linear, activation in self._layers:
            weight, bias = linear.weight, linear.bias
            values = weight.detach(), None if bias is None else bias.detach()
            layers.append((*values, self._momentum(weight), self._momentum(bias), activation))
        return DenseChain(layers, self._samples.inputs.flatten(1), self._samples.targets)

    def _momentum(self, parameter: Tensor | None) -> Tensor | None:
        """Return the momentum buffer, zero before the first step; None if there is no momentum."""
        if parameter is None or not self._optimizer.param_groups[0]["momentum"]:
            return None
        state = self._optimizer.state[parameter]
        if state.get(_MOMENTUM) is None:
            state[_MOMENTUM] = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
        momentum: Tensor = state[_MOMENTUM]
        return momentum

    def _forget(self, optimizer: Optimizer) -> None:
        self.__dict__.pop("_chain", None)  # rebuild it: the loaded state has new momentum tensors


def _are_plain_samples(samples: TensorSamples, layers: Sequence[nn.Linear]) -> bool:
    """Return whether `DenseChain` supports the samples, and the layers have matching widths."""
    inputs, targets = samples.inputs, samples.targets
    is_known = inputs.dtype == torch.float32 and targets.dtype == torch.int64
    if not (is_known and inputs.is_contiguous() and targets.is_contiguous() and targets.ndim == 1):
        return False
    widths = [inputs[0].numel(), *(layer.out_features for layer in layers)]
    return inputs.ndim > 1 and [layer.in_features for layer in layers] == widths[:-1]


def _is_plain_sgd(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> bool:
    """Return whether `DenseChain` can replace the optimizer's steps for these parameters."""
    own: dict[str, Any] = optimizer.__dict__
    hooks = own["_optimizer_step_pre_hooks"] or own["_optimizer_step_post_hooks"]
    if type(optimizer) is not torch.optim.SGD or hooks or "step" in own:
        return False
    group, *others = optimizer.param_groups
    # Each parameter must occur once, so tied weights are refused.
    is_whole = sorted(map(id, group["params"])) == sorted(map(id, parameters))
    return is_whole and not others and all(group[name] == one for name, one in _PLAIN.items())


def _layers_of(model: nn.Module) -> list[_Layer] | None:
    """Return the layers of a supported model; None for other models."""
    found: list[_Layer] = []
    if _has_any_global_hook():
        return None
    for number, leaf in enumerate(_leaves_of(model)):
        kind = type(leaf)
        if not _is_untouched(leaf) or not leaf.training:
            return None
        if isinstance(leaf, nn.Linear) and kind is nn.Linear:
            found.append((leaf, Activation.NONE))
        elif kind in _ACTIVATIONS and found and found[-1][1] is Activation.NONE:
            found[-1] = found[-1][0], _ACTIVATIONS[kind]
        elif number > 0 or not _flattens_samples(leaf):
            return None
    return found if found and all(_is_learnt(linear) for linear, _ in found) else None


def _flattens_samples(leaf: nn.Module) -> bool:
    return type(leaf) is nn.Flatten and (leaf.start_dim, leaf.end_dim) == (1, -1)


def _leaves_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules of nested `nn.Sequential` in order, or `[model]` for another module."""
    runs_its_modules = isinstance(model, nn.Sequential) and all(
        getattr(type(model), name) is getattr(nn.Sequential, name)
        for name in ("forward", "__iter__", "__call__")
    )
    if not runs_its_modules or not _is_untouched(model):
        return [model]
    return [leaf for child in model.children() for leaf in _leaves_of(child)]


def _is_untouched(module: nn.Module) -> bool:
    """Return whether a module has its original forward and no hooks."""
    own: dict[str, Any] = module.__dict__
    return not any(own[name] for name in _HOOKS) and "forward" not in own


def _is_learnt(layer: nn.Linear) -> bool:
    """Return whether all of a layer's parameters are trainable, float32 and without hooks."""
    return all(
        one.requires_grad
        and one.dtype == torch.float32
        and one.is_contiguous()
        and not one._backward_hooks
        and not getattr(one, "_post_accumulate_grad_hooks", None)
        for one in layer.parameters()
    )
