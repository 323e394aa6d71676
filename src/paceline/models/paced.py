"""Stand-ins for models in rehearsals: layers that take a given time and compute nothing.

A paced model has the layers and parameters of a real one, and hands out gradients of the real
sizes in the real order. What follows (hooks, copies, the exchange) is the real code. All values
are zeros.

**How time passes.** Layers sleep, so that the processor is free for the exchange. Within a phase
they sleep until absolute deadlines: a layer's deadline is the one before it plus its own time, so
that late wake-ups do not add up. What a gradient's hook does on the host is so taken to run beside
the next layers, as it does beside the queue of a GPU: computation never waits for a copy, unless
the host is held up for longer than what is queued: the layer that comes next, and never less than
`QUEUED_S`. Then that layer's time counts from now. A phase (forward, backward, update) counts from
when it is called, because it has to wait for what comes before it. Making the graph for backward is
the stand-in's own business, and happens within the time of the first layers.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from paceline.core.errors import InvalidInput
from paceline.core.workload import Layer, Parameter, Workload
from paceline.models.layers import ROOT

QUEUED_S = 1e-3  # kernels that the host has launched ahead: some tens, each of some 10 us or more
_FLOAT32_NBYTES = 4


class _Pace:
    """The deadlines of a phase."""

    def __init__(self) -> None:
        self._deadline = 0.0
        self._woke = 0.0

    def begin(self) -> None:
        """Begin a phase: count from now."""
        self._deadline = self._woke = time.monotonic()

    def resume(self) -> None:
        """Let what was done since `begin` not make the next layer late."""
        self._woke = time.monotonic()

    def spend(self, seconds: float) -> None:
        """Sleep until `seconds` after the last deadline; from now if that is late.

        Late is who was held up since waking up for longer than the layer and the queue last. Having
        overslept does not count: layers that are shorter than that would never make up for it.
        """
        now = time.monotonic()
        late = now - self._woke > max(seconds, QUEUED_S)
        start = now if late else self._deadline
        self._deadline = start + seconds
        while (left := self._deadline - time.monotonic()) > 0:
            time.sleep(left)
        self._woke = time.monotonic()


class _Part(nn.Module):
    """A node of the tree of modules that the layers' names describe."""

    def forward(self, pace: _Pace, seconds: float) -> None:
        """Take a layer's time; called as a module, so that its hooks run."""
        pace.spend(seconds)


@dataclass(frozen=True, eq=False)
class _Paced:
    """A layer: its module, its times, its parameters and the gradients that it hands out."""

    module: nn.Module
    forward_s: float
    backward_s: float
    parameters: tuple[nn.Parameter, ...]
    gradients: tuple[Tensor, ...]


class _Backward(torch.autograd.Function):
    """A link of the backward pass: takes a layer's time, then hands out its gradients."""

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, layer: _Paced, pace: _Pace, begins_phase: bool, *_: Tensor
    ) -> Tensor:
        ctx.layer, ctx.pace, ctx.begins_phase = layer, pace, begins_phase
        return scores.detach()

    @staticmethod
    def backward(ctx: Any, *of_scores: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.begins_phase:
            ctx.pace.begin()
        ctx.pace.spend(ctx.layer.backward_s)
        # Only what nobody else holds becomes a parameter's gradient without a copy: new aliases.
        return of_scores[0], None, None, None, *(g.detach() for g in ctx.layer.gradients)


class PacedModel(nn.Module):
    """What `paced` returns. `update_s` is for its optimizer, `PacedSGD`."""

    def __init__(
        self,
        workload: Workload,
        forward_s: Sequence[float],
        backward_s: Sequence[float],
        update_s: float,
        num_classes: int,
    ) -> None:
        super().__init__()
        self.update_s = update_s
        self._num_classes = num_classes
        self._pace = _Pace()
        self._backward_order = workload.backward_order
        self._paced = [
            self._layer(layer, *times)
            for layer, *times in zip(workload.layers, forward_s, backward_s, strict=True)
        ]

    def forward(self, inputs: Tensor) -> Tensor:
        """Return zeros (N, num_classes) for `inputs` (N, ...); backward makes all gradients."""
        self._pace.begin()
        scores = self._scores(inputs.shape[0])
        self._pace.resume()
        for layer in self._paced:
            if layer.module is self:  # which is being called, and its hooks have run
                self._pace.spend(layer.forward_s)
            else:
                layer.module(self._pace, layer.forward_s)
        return scores

    def _scores(self, num_samples: int) -> Tensor:
        """Return zeros whose graph takes the layers' times and hands out their gradients."""
        scores = torch.zeros(num_samples, self._num_classes)
        for number in reversed(self._backward_order):
            layer, begins_phase = self._paced[number], number == self._backward_order[0]
            scores = _Backward.apply(  # type: ignore[no-untyped-call]
                scores, layer, self._pace, begins_phase, *layer.parameters
            )
        return scores

    def _layer(self, layer: Layer, forward_s: float, backward_s: float) -> _Paced:
        module = self._module(layer.name)
        parameters = []
        for parameter in layer.parameters:
            parameters.append(nn.Parameter(torch.zeros(parameter.shape)))
            module.register_parameter(_short_name(layer, parameter), parameters[-1])
        # Not as buffers of the module: replicas send those to one another.
        gradients = tuple(torch.zeros_like(p.detach()) for p in parameters)
        return _Paced(module, forward_s, backward_s, tuple(parameters), gradients)

    def _module(self, name: str) -> nn.Module:
        """Return the module of that name; it and its parents are made where they are missing."""
        module: nn.Module = self
        for part in [] if name == ROOT else name.split("."):
            if part not in module._modules:
                module.add_module(part, _Part())
            module = module.get_submodule(part)
        return module


def paced(
    workload: Workload,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    update_s: float,
    num_classes: int = 1,
) -> PacedModel:
    """Return a model with the workload's layers that takes the given seconds for each of them.

    Both sequences stand in the order of `workload.layers` (`core.pace.LayerTimes` has them).
    `layers_of` finds the same layers and parameters as in the real model, but in forward order
    where that differs from the order of registration there. Gradients become ready in the
    workload's order of layers, those of one layer together. Targets of a loss lie below
    `num_classes`. Memory is that of the float32 parameters, on the CPU, and of one gradient each.
    Raises ValueError for times that are missing, negative or not finite, and InvalidInput for
    parameters of another size than float32.
    """
    for name, times in (("forward_s", forward_s), ("backward_s", backward_s)):
        if len(times) != len(workload.layers):
            raise ValueError(f"{name}: {len(times)} times for {len(workload.layers)} layers")
    for seconds in (*forward_s, *backward_s, update_s):
        _check_time(seconds)
    for layer in workload.layers:
        for parameter in layer.parameters:
            _check_parameter(workload, layer, parameter)
    return PacedModel(workload, forward_s, backward_s, update_s, num_classes)


class PacedSGD(torch.optim.Optimizer):
    """An optimizer whose step takes `update_s` seconds and changes nothing."""

    def __init__(self, params: ParamsT, update_s: float) -> None:
        _check_time(update_s)
        super().__init__(params, {})
        self._update_s = update_s
        self._pace = _Pace()

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take the time of a weight update; return the loss of `closure`, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._pace.begin()
        self._pace.spend(self._update_s)
        return loss


def _check_time(seconds: float) -> None:
    if not (isfinite(seconds) and seconds >= 0):
        raise ValueError(f"a layer or an update cannot take {seconds} s")


def _check_parameter(workload: Workload, layer: Layer, parameter: Parameter) -> None:
    if parameter.element_size != _FLOAT32_NBYTES:
        raise InvalidInput(
            f"{workload.name}: parameter {parameter.name!r} has {parameter.element_size} bytes a "
            "value; only float32 models can be rehearsed"
        )
    if not (name := _short_name(layer, parameter)) or "." in name:
        raise ValueError(
            f"{workload.name}: parameter {parameter.name!r} is none of layer {layer.name!r}"
        )


def _short_name(layer: Layer, parameter: Parameter) -> str:
    """Return the parameter's name in its module; empty if its name does not say so."""
    prefix = "" if layer.name == ROOT else f"{layer.name}."
    return parameter.name.removeprefix(prefix) if parameter.name.startswith(prefix) else ""
