"""Layers that take the time of another device: paced ones compute nothing, stretched ones do.

A paced model has the layers and parameters of a real one, and hands out gradients of the real
sizes in the real order. What follows (hooks, copies, the exchange) is the real code. All values
are zeros, unless what travels of a gradient depends on its values.

**How time passes.** Layers sleep, so that the processor is free for the exchange. Within a phase
they sleep until absolute deadlines: a layer's deadline is the one before it plus its own time, so
that late wake-ups do not add up. What a gradient's hook does on the host is so taken to run beside
the next layers, as it does beside the queue of a GPU: computation never waits for a copy, unless
the host is held up for longer than what is queued: the layer that comes next, and never less than
`QUEUED_S`. Then that layer's time counts from now. A phase (forward, backward, update) counts from
when it is called, because it has to wait for what comes before it. Making the graph for backward is
the stand-in's own business, and happens within the time of the first layers.

**Stretched models** do the real arithmetic, and then wait, layer by layer. Forward is cut at each
entry of a layer's module, backward where a gradient is ready: the borders that `describe` and the
recorder have. The wait stands before the border, so that a gradient comes as late as it would on
the slower device. Nothing is added to the graph, and no value changes.
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

QUEUED_S = 1e-3  # kernels that the host has launched ahead: some tens, each of some 10 us or more


class _PhaseClock:
    def __init__(self) -> None:
        self._deadline = 0.0
        self._woke = 0.0

    def begin(self) -> None:
        """Begin a phase: count from now."""
        self._deadline = self._woke = time.monotonic()

    def resume(self) -> None:
        """Forgive the delay since `begin`, so that the next layer does not count as late."""
        self._woke = time.monotonic()

    def spend(self, seconds: float) -> None:
        """Sleep until `seconds` after the last deadline, or from now if the host is late.

        It is late if other work took longer since waking up than the layer and the queue last.
        Oversleeping does not count: layers shorter than that could never make up for it.
        """
        now = time.monotonic()
        late = now - self._woke > max(seconds, QUEUED_S)
        start = now if late else self._deadline
        self._deadline = start + seconds
        while (left := self._deadline - time.monotonic()) > 0:
            time.sleep(left)
        self._woke = time.monotonic()


class _PacedModule(nn.Module):
    """A node of the tree of modules that the layers' names describe."""

    def forward(self, clock: _PhaseClock, seconds: float) -> None:
        """Take a layer's time; called as a module, so that its hooks run."""
        clock.spend(seconds)


@dataclass(frozen=True, eq=False)
class _PacedLayer:
    """A layer: its module, times and parameters, and the gradients that it hands out."""

    module: nn.Module
    clock: _PhaseClock
    forward_s: float
    backward_s: float
    parameters: tuple[nn.Parameter, ...]
    gradients: tuple[Tensor, ...]
    hand_out: Callable[[Tensor], Tensor]


class _Backward(torch.autograd.Function):
    """A link of the backward pass: takes a layer's time, then hands out its gradients."""

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
    """A model with a workload's layers, which take the given seconds and compute nothing.

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
        # The graph of these zeros takes the layers' times and hands out their gradients.
        for number in reversed(self._backward_order):
            layer, begins = self._paced[number], number == self._backward_order[0]
            scores = _Backward.apply(  # type: ignore[no-untyped-call]
                scores, layer, begins, *layer.parameters
            )
        self._clock.resume()
        for layer in self._paced:
            if layer.module is self:  # which is being called, and its hooks have run
                self._clock.spend(layer.forward_s)
            else:
                layer.module(self._clock, layer.forward_s)
        return scores

    def _layer(self, layer: Layer, forward_s: float, backward_s: float) -> _PacedLayer:
        """Make a layer; its module and the parents of that are added where they are missing."""
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
        # Autograd takes a gradient without a copy only if nothing else refers to it: new aliases.
        # An exchange may write its result there, so that values would not last.
        hand_out = torch.clone if self._gradient_like else Tensor.detach
        times = (self._clock, forward_s, backward_s)
        return _PacedLayer(module, *times, tuple(parameters), gradients, hand_out)


class PacedSGD(torch.optim.Optimizer):
    """An optimizer whose step takes `update_s` seconds and changes nothing."""

    def __init__(self, params: ParamsT, update_s: float) -> None:
        _check_time(update_s)
        super().__init__(params, {})
        self._update_s = update_s
        self._clock = _PhaseClock()

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Take the time of a weight update; return the loss of `closure`, if there is one."""
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
    """Hooks that make each layer of `model` take `factor` times as long, forward and backward.

    They stand for a slower device: the arithmetic is the real one, to the last bit, and after it
    the layer sleeps. What follows a layer and has no parameters counts with it; loss and weight
    update are the caller's. What hooks do with gradients that are ready is not stretched. The model
    is not freed before `remove` is called. Raises InvalidInput for a factor below 1, and for a
    model that is not on the CPU, where work is queued and the host does not know how long it takes.
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
        self._since: float | None = None  # begin of the work that is not yet stretched
        self._owed_s = 0.0  # below zero after a wait that was too long
        self._backward: int | None = None
        self._handles: list[RemovableHandle] = []
        add = self._handles.append
        self._nodes: list[Node] = []  # autograd keeps neither them nor their hooks alive
        layers = layers_of(model)
        for layer in layers:
            # Before the hooks of others: a recorder sets its border after the wait.
            add(layer.module.register_forward_pre_hook(self._pay, prepend=True))
        # Last, and so the first to run if the model is a layer itself.
        add(model.register_forward_pre_hook(self._restart, prepend=True))
        add(model.register_forward_hook(self._returned))
        for _, parameter in (own for layer in layers for own in layer.parameters):
            add(parameter.register_hook(self._pay))
            # A post hook of the accumulation node runs after all hooks of the gradient.
            self._nodes.append(get_gradient_edge(parameter).node)
            add(self._nodes[-1].register_hook(self._restart))

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._nodes = [], []

    def _pay(self, *_: Any) -> None:
        """Wait for what has been computed since the last border, and set the next one."""
        now = time.monotonic()
        if self._since is not None:
            self._owed_s += (self._factor - 1) * (now - self._since)
        if self._owed_s > 0:
            time.sleep(self._owed_s)
        self._since = time.monotonic()
        self._owed_s -= self._since - now

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

    def _restart(self, *_: Any) -> None:
        """Count from now: what others do when a gradient is ready is no work of a layer."""
        self._since = time.monotonic()
