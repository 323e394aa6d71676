"""Emulate another device: paced models sleep, stretched models compute and then sleep.

A paced model has the layers and parameters of a real one, and produces gradients of the real sizes
in the real order. Hooks, copies and the exchange are the real code. All values are zero, unless the
size of encoded gradients depends on values.

**Time.** Layers sleep, so that the processor is free for the exchange. Within a phase they sleep
until absolute deadlines: each deadline is the previous one plus the layer's time, so that late
wake-ups do not accumulate. Host work in a gradient's hook therefore overlaps with the next layers,
as with a GPU's queue, unless it takes longer than the queued work: the next layer, and at least
`QUEUED_S`. Then that layer's time counts from now. A phase (forward, backward, update) counts from
its call. Building the graph for backward happens within the time of the first layers.

**Stretched models** compute, and then wait, layer by layer. Forward is divided at each entry of a
layer's module, backward when a gradient is ready, as in `describe` and the recorder. The wait comes
before the border, so that a gradient is as late as on the slower device. The graph and all values
are unchanged.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from paceline.training.models.layers import ROOT, layers_of

QUEUED_S = 1e-3  # time of the kernels queued on a GPU: some tens, each of 10 us or more


class _PhaseClock:
    def __init__(self) -> None:
        self._deadline = 0.0
        self._woke = 0.0

    def begin(self) -> None:
        """Begin a phase now."""
        self._deadline = self._woke = time.monotonic()

    def resume(self) -> None:
        """Ignore the delay since `begin`, so that the next layer does not count as late."""
        self._woke = time.monotonic()

    def spend(self, seconds: float) -> None:
        """Sleep until `seconds` after the last deadline, or from now if the host is late.

        The host is late if other work since the last wake-up took longer than the layer and the
        queue. Oversleeping does not count, because short layers could never make up for it.
        """
        now = time.monotonic()
        late = now - self._woke > max(seconds, QUEUED_S)
        start = now if late else self._deadline
        self._deadline = start + seconds
        while (left := self._deadline - time.monotonic()) > 0:
            time.sleep(left)
        self._woke = time.monotonic()


class _PacedModule(nn.Module):
    """A module in the tree given by the layers' names."""

    def forward(self, clock: _PhaseClock, seconds: float) -> None:
        """Sleep for a layer's time; called as a module, so that hooks run."""
        clock.spend(seconds)


@dataclass(frozen=True, eq=False)
class _PacedLayer:
    """A layer's module, times, parameters and gradients."""

    module: nn.Module
    clock: _PhaseClock
    forward_s: float
    backward_s: float
    parameters: tuple[nn.Parameter, ...]
    gradients: tuple[Tensor, ...]
    hand_out: Callable[[Tensor], Tensor]


class _Backward(torch.autograd.Function):
    """A layer's backward: sleeps, then returns the gradients."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, layer: _PacedLayer, begins: bool, *_: Tensor) -> Tensor:
        ctx.layer, ctx.begins_phase = layer, begins
        return scores.detach()

    @staticmethod
    def backward(ctx: Any, *of_scores: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.begins_phase:
            ctx.layer.clock.begin()
        ctx.layer.clock.spend(ctx.layer.backward_s)
        return of_scores[0], None, None, *map(ctx.layer.hand_out, ctx.layer.gradients)


class PacedModel(nn.Module):
    """A model whose layers sleep for given times instead of computing.

    `forward_s` and `backward_s` stand in the order of `workload.layers` (`core.cost.LayerTimes` has
    them); `update_s` is for its `PacedSGD`. `layers_of` finds the same layers and parameters as in
    the real model, but in forward order where that differs from the order of registration there.
    Gradients become ready in the workload's order of layers, those of one layer together. Targets
    of a loss lie below `num_classes`. `gradient_like` makes a parameter's gradient, if values
    matter: then each backward copies them. Memory is that of the float32 parameters, on the CPU,
    and of one gradient each. Raises ValueError for times that are missing, negative or not finite,
    and InvalidInput for parameters of another size than float32.
    """

    def __init__(
        self,
        workload: Workload,
        forward_s: Sequence[float],
        backward_s: Sequence[float],
        update_s: float,
        num_classes: int = 1,
        gradient_like: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        for name, times in (("forward_s", forward_s), ("backward_s", backward_s)):
            if len(times) != len(workload.layers):
                raise ValueError(f"{name}: {len(times)} times for {len(workload.layers)} layers")
        for seconds in (*forward_s, *backward_s, update_s):
            _check_time(seconds)
        super().__init__()
        self.update_s = update_s
        self._name, self._num_classes = workload.name, num_classes
        self._clock = _PhaseClock()
        self._backward_order, self._gradient_like = workload.backward_order, gradient_like
        self._paced = [
            self._layer(layer, *times)
            for layer, *times in zip(workload.layers, forward_s, backward_s, strict=True)
        ]

    def forward(self, inputs: Tensor) -> Tensor:
        """Return zeros (N, num_classes) for `inputs` (N, ...); backward makes all gradients."""
        self._clock.begin()
        scores = torch.zeros(inputs.shape[0], self._num_classes)
        # The graph of these zeros paces the layers and returns their gradients.
        for number in reversed(self._backward_order):
            layer, begins = self._paced[number], number == self._backward_order[0]
            scores = _Backward.apply(  # type: ignore[no-untyped-call]
                scores, layer, begins, *layer.parameters
            )
        self._clock.resume()
        for layer in self._paced:
            if layer.module is self:  # its hooks have already run
                self._clock.spend(layer.forward_s)
            else:
                layer.module(self._clock, layer.forward_s)
        return scores

    def _layer(self, layer: Layer, forward_s: float, backward_s: float) -> _PacedLayer:
        """Create a layer, with its module and missing parent modules."""
        module: nn.Module = self
        for part in [] if layer.name == ROOT else layer.name.split("."):
            if part not in module._modules:
                module.add_module(part, _PacedModule())
            module = module.get_submodule(part)
        prefix = "" if layer.name == ROOT else f"{layer.name}."
        parameters = []
        for parameter in layer.parameters:
            if parameter.element_size != torch.float32.itemsize:
                raise InvalidInput(
                    self._name,
                    f"parameter {parameter.name!r} has {parameter.element_size} bytes a value",
                    hint="only float32 models can be rehearsed",
                )
            short_name = parameter.name.removeprefix(prefix)
            if not parameter.name.startswith(prefix) or not short_name or "." in short_name:
                raise ValueError(
                    f"{self._name}: parameter {parameter.name!r} is none of layer {layer.name!r}"
                )
            parameters.append(nn.Parameter(torch.zeros(parameter.shape)))
            module.register_parameter(short_name, parameters[-1])
        # Not buffers of the module: DistributedDataParallel broadcasts those.
        like = self._gradient_like or torch.zeros_like
        gradients = tuple(like(p.detach()) for p in parameters)
        # Autograd avoids a copy only for an unreferenced tensor, so return new aliases; but an
        # exchange may overwrite them, so copy gradients whose values matter.
        hand_out = torch.clone if self._gradient_like else Tensor.detach
        times = (self._clock, forward_s, backward_s)
        return _PacedLayer(module, *times, tuple(parameters), gradients, hand_out)


class PacedSGD(torch.optim.Optimizer):
    """An optimizer whose step sleeps for `update_s` seconds."""

    def __init__(self, params: ParamsT, update_s: float) -> None:
        _check_time(update_s)
        super().__init__(params, {})
        self._update_s = update_s
        self._clock = _PhaseClock()

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Sleep for the time of a weight update; return the loss of `closure`, if given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._clock.begin()
        self._clock.spend(self._update_s)
        return loss


def _check_time(seconds: float) -> None:
    if not (isfinite(seconds) and seconds >= 0):
        raise ValueError(f"a layer or an update cannot take {seconds} s")


class Stretched:
    """Hooks that slow down each layer of `model` by `factor`, forward and backward.

    Layers compute bit-identical results and then sleep. Operations without parameters count with
    the layer before them; loss, weight update and hooks on gradients are not slowed down. The model
    is not freed before `remove` is called. Raises InvalidInput for a factor below 1, and for a
    model on a GPU, whose work is queued for an unknown time.
    """

    def __init__(self, model: nn.Module, factor: float) -> None:
        if not (isfinite(factor) and factor >= 1):
            raise InvalidInput(
                "factor", f"a device can be slowed down {factor} times only from 1 up"
            )
        for name, parameter in model.named_parameters():
            if parameter.device.type != "cpu":
                raise InvalidInput(
                    "model",
                    f"parameter {name!r} lies on {parameter.device}",
                    hint="only a model on the CPU can be stretched",
                )
        self._factor = factor
        self._since: float | None = None  # start of the work not slowed down yet
        self._owed_s = 0.0  # negative after oversleeping
        self._backward: int | None = None
        self._handles: list[RemovableHandle] = []
        add = self._handles.append
        self._nodes: list[Node] = []  # keep the nodes alive, with their hooks
        layers = layers_of(model)
        for layer in layers:
            # Before other hooks, so that a recorder's border follows the wait.
            add(layer.module.register_forward_pre_hook(self._pay, prepend=True))
        # Registered last, to run first if the model itself is a layer.
        add(model.register_forward_pre_hook(self._restart, prepend=True))
        add(model.register_forward_hook(self._returned))
        for _, parameter in (own for layer in layers for own in layer.parameters):
            add(parameter.register_hook(self._pay))
            # A post hook of the accumulation node runs after all gradient hooks.
            self._nodes.append(get_gradient_edge(parameter).node)
            add(self._nodes[-1].register_hook(self._restart))

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._nodes = [], []

    def _pay(self, *_: Any) -> None:
        """Sleep in proportion to the work since the last border, and set a new border."""
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
        """Begin a backward pass, once for all outputs."""
        task: int = torch._C._current_graph_task_id()
        if task != self._backward:
            self._backward, self._since = task, time.monotonic()

    def _restart(self, *_: Any) -> None:
        """Set a border after hooks of a gradient, which are not a layer's work."""
        self._since = time.monotonic()
