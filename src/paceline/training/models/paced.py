"""Emulate another device: paced models sleep, stretched models compute and then sleep.

A paced model has the layers and parameters of a real model, and produces gradients of the same
sizes in the same order. Gradient hooks, copies and the exchange run as in real training.

Within a phase (forward, backward, update), each paced layer sleeps until a deadline: the previous
layer's deadline plus the layer's time. Late wake-ups therefore do not accumulate. CPU work in a
gradient's hook overlaps with the next layers, as if these layers were queued on a GPU.

A stretched model computes a layer, and then waits. In forward, a layer begins when its module is
called; in backward, it ends when its gradient is ready, as in `describe` and the recorder. The wait
delays the gradient as much as a slower device would.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.optim.optimizer import ParamsT
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from paceline.core.errors import InvalidInput
from paceline.core.workload import Layer, Workload
from paceline.training.models.halves import Halves
from paceline.training.models.layers import ROOT, LayerModule, layers_of

QUEUED_S = 1e-3  # work that a GPU's queue holds: tens of kernels of 10 us or more


class _PhaseClock:
    def __init__(self) -> None:
        self._deadline = 0.0
        self._woke = 0.0

    def begin(self) -> None:
        """Begin a phase (forward, backward or update): the first layer's time starts now."""
        self._deadline = self._woke = time.monotonic()

    def resume(self) -> None:
        """Forget the CPU work so far, so that it does not make the next `spend` late."""
        self._woke = time.monotonic()

    def spend(self, seconds: float) -> None:
        """Sleep until the last deadline plus `seconds`; if the CPU is late, sleep for `seconds`.

        The CPU is late if its work since the last wake-up took longer than both `seconds` and
        `QUEUED_S`. Oversleeping is not work, and does not make the CPU late.
        """
        now = time.monotonic()
        late = now - self._woke > max(seconds, QUEUED_S)
        start = now if late else self._deadline
        self._deadline = start + seconds
        while (left := self._deadline - time.monotonic()) > 0:
            time.sleep(left)
        self._woke = time.monotonic()


class _PacedModule(nn.Module):
    """A module of the paced model, placed in the module tree by its name ("features.0")."""

    def forward(self, clock: _PhaseClock, seconds: float) -> None:
        """Sleep for `seconds`. A module call, unlike `clock.spend`, also runs the forward hooks."""
        clock.spend(seconds)


@dataclass(frozen=True, eq=False)
class _PacedLayer:
    """A paced layer: its module, forward and backward times, parameters, and gradients."""

    module: nn.Module
    forward_s: float
    backward_s: float
    parameters: tuple[nn.Parameter, ...]
    gradients: tuple[Tensor, ...]


class _Backward(torch.autograd.Function):
    """Implements a layer's backward, which sleeps and then returns the gradients."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, model: "PacedModel", number: int, *_: Tensor) -> Tensor:
        ctx.model, ctx.number = model, number
        return scores.detach()

    @staticmethod
    def backward(ctx: Any, *of_scores: Tensor) -> tuple[Tensor | None, ...]:
        return of_scores[0], None, None, *ctx.model.gradients_of(ctx.number)


class PacedModel(nn.Module):
    """A model whose layers sleep for given times instead of computing.

    `forward_s`, `backward_s`: seconds of each layer, in the order of `workload.layers`.
    For this model, `layers_of` returns layers and parameters with the real model's names and
    shapes, in forward order. Gradients become ready in the workload's backward order; the gradients
    of one layer become ready together. `output_shape`: shape of the output for one sample.
    `gradient_like(p)` makes the gradient of parameter `p` once; each backward pass returns a copy.
    Without `gradient_like`, gradients are zero.

    Raises InvalidInput for parameters other than float32.
    """

    def __init__(
        self,
        workload: Workload,
        forward_s: Sequence[float],
        backward_s: Sequence[float],
        output_shape: Sequence[int] = (1,),
        gradient_like: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self._name, self._output_shape = workload.name, output_shape
        self._clock = _PhaseClock()
        self._backward_order, self._gradient_like = workload.backward_order, gradient_like
        self._paced = [
            self._layer(layer, *times)
            for layer, *times in zip(workload.layers, forward_s, backward_s, strict=True)
        ]

    def forward(self, inputs: Tensor) -> Tensor:
        """Return zeros (N, *output_shape) for inputs (N, ...); backward makes all gradients."""
        self._clock.begin()
        scores = torch.zeros(len(inputs), *self._output_shape, device=inputs.device)
        # Give the scores a backward node per layer, which sleeps and returns the gradients.
        for number in reversed(self._backward_order):
            scores = _Backward.apply(  # type: ignore[no-untyped-call]
                scores, self, number, *self._paced[number].parameters
            )
        self._clock.resume()
        for layer in self._paced:
            if layer.module is self:  # calling this model again would run its hooks twice
                self._clock.spend(layer.forward_s)
            else:
                layer.module(self._clock, layer.forward_s)
        return scores

    def gradients_of(self, number: int) -> Iterator[Tensor]:
        """Sleep for the backward time of layer `number`, and return the layer's gradients."""
        if number == self._backward_order[0]:
            self._clock.begin()
        self._clock.spend(self._paced[number].backward_s)
        # Return new tensors, because autograd copies a gradient that is referenced elsewhere. They
        # are aliases of zeros, or clones of other values, which an exchange may overwrite.
        hand_out = torch.clone if self._gradient_like else Tensor.detach
        return map(hand_out, self._paced[number].gradients)

    def _layer(self, layer: Layer, forward_s: float, backward_s: float) -> _PacedLayer:
        """Create a layer: its module, missing parent modules, parameters and gradients."""
        path = [] if layer.name == ROOT else layer.name.split(".")
        module = _submodule(self, path, _PacedModule)
        parameters = []
        for parameter in layer.parameters:
            if parameter.element_size != torch.float32.itemsize:
                problem = f"must have float32 parameters to be emulated ({parameter.name!r})"
                raise InvalidInput(self._name, problem)
            parameters.append(nn.Parameter(torch.zeros(parameter.shape)))
            module.register_parameter(parameter.name.rpartition(".")[2], parameters[-1])
        # Gradients are not buffers, because DistributedDataParallel would broadcast buffers.
        like = self._gradient_like or torch.zeros_like
        gradients = tuple(like(one.detach()) for one in parameters)
        return _PacedLayer(module, forward_s, backward_s, tuple(parameters), gradients)


class PacedSGD(torch.optim.Optimizer):
    """An optimizer whose step sleeps for `update_s` seconds."""

    def __init__(self, params: ParamsT, update_s: float) -> None:
        super().__init__(params, {})
        self._update_s = update_s
        self._clock = _PhaseClock()

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Sleep for the time of a weight update; `closure` is not called."""
        self._clock.begin()
        self._clock.spend(self._update_s)


class PacedWhole(nn.Module):
    """Holds the parameters of a body and a head under the whole model's names."""

    def __init__(self, body: PacedModel, head: PacedModel) -> None:
        super().__init__()
        # Training calls body and head, not this model, so list the layers of body and head.
        self.layers: tuple[LayerModule, ...] = (*layers_of(body), *layers_of(head))
        for name, parameter in chain(body.named_parameters(), head.named_parameters()):
            *path, own = name.split(".")
            _submodule(self, path, nn.Module).register_parameter(own, parameter)


def _submodule(module: nn.Module, path: Sequence[str], make: Callable[[], nn.Module]) -> nn.Module:
    """Return the submodule at a path; `make` creates missing submodules."""
    for part in path:
        if part not in module._modules:
            module.add_module(part, make())
        module = module.get_submodule(part)
    return module


class _ZeroGradients(torch.autograd.Function):
    """Passes the scores through unchanged, and gives the activations a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, activations: Tensor) -> Tensor:
        ctx.shape = activations.shape
        return scores.detach()

    @staticmethod
    def backward(ctx: Any, *of_scores: Tensor) -> tuple[Tensor | None, ...]:
        # Return an alias: autograd would copy the zeros themselves, which the cache references.
        return of_scores[0], _zeros(ctx.shape).detach()


_zeros = lru_cache(maxsize=2)(torch.zeros)  # two shapes: an epoch's last batch may be smaller


def paced_halves(
    body_workload: Workload,
    head_workload: Workload,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    gradient_like: Callable[[Tensor], Tensor] | None = None,
) -> tuple[PacedWhole, Halves]:
    """Return a paced model, and its body and head as `Halves`.

    `forward_s`, `backward_s`: seconds of the body's layers, then of the head's layers, in forward
    order. Activations and their gradients are zeros of the real size. `gradient_like` supplies the
    body's gradients; the head's gradients are zero. Raises the errors of `PacedModel`.
    """
    count = len(body_workload.layers)
    values = head_workload.input_nbytes // (torch.float32.itemsize * body_workload.batch_size)
    times = forward_s[:count], backward_s[:count]
    body = PacedModel(body_workload, *times, (values,), gradient_like)
    head = PacedModel(head_workload, forward_s[count:], backward_s[count:])
    # Make the head's output depend on the activations, so that these get (zero) gradients.
    head.register_forward_hook(lambda _, inputs, scores: _ZeroGradients.apply(scores, inputs[0]))  # type: ignore[no-untyped-call]
    in_body, in_head = (tuple(name for name, _ in half.named_parameters()) for half in (body, head))
    return PacedWhole(body, head), Halves(body, head, in_body, in_head, (values,))


class Stretched:
    """Hooks that slow down each layer of `model` by `factor`, in both passes.

    Results are bit-identical. An operation without parameters counts as part of the previous layer.
    The loss, the weight update and gradient hooks are not slowed down. `remove` removes the hooks.
    Raises InvalidInput for a factor below 1, and for a model on a GPU: a GPU queues work, so the
    time of a layer is unknown.
    """

    def __init__(self, model: nn.Module, factor: float) -> None:
        if not (isfinite(factor) and factor >= 1):
            raise InvalidInput("factor", "must be at least 1 and finite", got=factor)
        for parameter in model.parameters():
            if parameter.device.type != "cpu":
                raise InvalidInput("model", "must be on the CPU", got=str(parameter.device))
        self._factor = factor
        self._since: float | None = None  # time when the current layer began
        self._owed_s = 0.0  # time still to sleep; negative after oversleeping
        self._backward: int | None = None
        self._handles: list[RemovableHandle] = []
        add = self._handles.append
        self._nodes: list[Node] = []  # references, so that autograd keeps the nodes and their hooks
        layers = layers_of(model)
        for layer in layers:
            # Wait before other hooks run, so that a recorder begins the layer after the wait.
            add(layer.module.register_forward_pre_hook(self._pay, prepend=True))
        # The newest prepended hook runs first: if the model itself is a layer, `_restart` runs
        # before `_pay`.
        add(model.register_forward_pre_hook(self._restart, prepend=True))
        add(model.register_forward_hook(self._returned))
        for _, parameter in (own for layer in layers for own in layer.parameters):
            add(parameter.register_hook(self._pay))
            # This hook of the AccumulateGrad node runs after all hooks of the gradient.
            self._nodes.append(get_gradient_edge(parameter).node)
            add(self._nodes[-1].register_hook(self._restart))

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._nodes = [], []

    def _pay(self, *_: Any) -> None:
        """Sleep, so that the layer takes `factor` times as long; then time the next layer."""
        now = time.monotonic()
        if self._since is not None:
            self._owed_s += (self._factor - 1) * (now - self._since)
        if self._owed_s > 0:
            time.sleep(self._owed_s)
        self._since = time.monotonic()
        self._owed_s -= self._since - now

    def _returned(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        self._pay()
        self._since = None  # the loss is not slowed down
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(self._reached)

    def _reached(self, gradient: Tensor) -> None:
        """Begin timing a backward pass as soon as any output has its gradient."""
        task: int = torch._C._current_graph_task_id()
        if task != self._backward:
            self._backward, self._since = task, time.monotonic()

    def _restart(self, *_: Any) -> None:
        """Begin timing the next layer without sleeping: time of other hooks belongs to no layer."""
        self._since = time.monotonic()
