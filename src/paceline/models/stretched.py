"""A slower device: the real arithmetic, and then a wait, layer by layer.

Forward is cut at each entry of a layer's module, backward where a gradient is ready: the borders
that `describe` and the recorder have. The wait stands before the border, so that a gradient comes
as late as it would on the slower device. Nothing is added to the graph, and no value changes.
"""

import time
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from paceline.core.errors import InvalidInput
from paceline.models.layers import layers_of


class Stretched:
    """What `stretch` returns: `remove` lets the model run at its own speed again."""

    def __init__(self, model: nn.Module, factor: float) -> None:
        self._factor = factor
        self._since: float | None = None  # when the work began that has not been paid for
        self._owed_s = 0.0  # below zero after a wait that was too long
        self._backward: int | None = None
        self._handles: list[RemovableHandle] = []
        self._nodes: list[Node] = []  # alive only while somebody holds them, and so their hooks
        layers = layers_of(model)
        for layer in layers:
            # Before the hooks of others: a recorder sets its border after the wait.
            self._add(layer.module.register_forward_pre_hook(self._entered, prepend=True))
        # Last, and so the first to run if the model is a layer itself.
        self._add(model.register_forward_pre_hook(self._began, prepend=True))
        self._add(model.register_forward_hook(self._returned))
        for _, parameter in (own for layer in layers for own in layer.parameters):
            self._add(parameter.register_hook(self._computed))
            # Of all hooks on an accumulated gradient this one runs last, whoever adds them when.
            self._nodes.append(get_gradient_edge(parameter).node)
            self._add(self._nodes[-1].register_hook(self._accumulated))

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._nodes = [], []

    def _add(self, handle: RemovableHandle) -> None:
        self._handles.append(handle)

    def _pay(self) -> None:
        """Wait for what has been computed since the last border, and set the next one."""
        now = time.monotonic()
        if self._since is not None:
            self._owed_s += (self._factor - 1) * (now - self._since)
        if self._owed_s > 0:
            time.sleep(self._owed_s)
        self._since = time.monotonic()
        self._owed_s -= self._since - now

    def _began(self, *_: Any) -> None:
        self._since = time.monotonic()

    def _entered(self, *_: Any) -> None:
        self._pay()

    def _returned(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        self._pay()
        self._since = None  # what follows is the loss, and no part of the model
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(self._reached)

    def _reached(self, gradient: Tensor) -> None:
        """Begin a backward pass, once for all outputs."""
        task: int = torch._C._current_graph_task_id()
        if task != self._backward:
            self._backward, self._since = task, time.monotonic()

    def _computed(self, gradient: Tensor) -> None:
        self._pay()

    def _accumulated(self, *_: Any) -> None:
        # What an exchange does when a gradient is ready is no work of the layer.
        self._since = time.monotonic()


def stretch(model: nn.Module, factor: float) -> Stretched:
    """Have each layer of `model` take `factor` times as long as it does here, both ways.

    It stands for a slower device: the arithmetic is the real one, to the last bit, and after it
    the layer sleeps. What follows a layer and has no parameters counts with it; loss and weight
    update are the caller's. What hooks do with gradients that are ready is not stretched. The model
    is not freed before `remove` is called. Raises InvalidInput for a factor below 1, and for a
    model that is not on the CPU, where work is queued and the host does not know how long it takes.
    """
    if not (isfinite(factor) and factor >= 1):
        raise InvalidInput(f"factor: a device can be slowed down {factor} times only from 1 up")
    for name, parameter in model.named_parameters():
        if parameter.device.type != "cpu":
            raise InvalidInput(
                f"parameter {name!r} lies on {parameter.device}; only a model on the CPU can be "
                "stretched"
            )
    return Stretched(model, factor)
