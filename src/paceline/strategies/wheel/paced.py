"""Halves for rehearsals: stand-ins that take a body's and a head's time and compute nothing."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from paceline.models.layers import LayerModule, layers_of
from paceline.models.paced import PacedModel, paced
from paceline.models.workload import workload_of
from paceline.strategies.wheel.config import Wheel
from paceline.strategies.wheel.halves import Halves
from paceline.strategies.wheel.pace import NUM_CLASSES, Pace
from paceline.strategies.wheel.split import Split, split

_FLOAT32_NBYTES = 4


class PacedWhole(nn.Module):
    """The parameters of both halves under the whole model's names; `update_s` is for `PacedSGD`."""

    def __init__(self, body: PacedModel, head: PacedModel) -> None:
        super().__init__()
        self.update_s = head.update_s
        self._halves = (body, head)  # a tuple is no module: names stay those of the whole model
        for half in self._halves:
            for name, parameter in half.named_parameters():
                *path, own = name.split(".")
                self._module(path).register_parameter(own, parameter)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return zeros (N, num_classes) for `inputs` (N, ...), after both halves' times."""
        body, head = self._halves
        scores: Tensor = head(body(inputs))
        return scores

    @property
    def layers(self) -> tuple[LayerModule, ...]:
        """The layers of both halves: their modules are called, and not those of the whole."""
        return tuple(chain.from_iterable(map(layers_of, self._halves)))

    def _module(self, path: Sequence[str]) -> nn.Module:
        module: nn.Module = self
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        return module


class _Residuals(torch.autograd.Function):
    """Zeros for what a head has taken in; what came of its scores goes on to its layers."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, activations: Tensor, zeros: Tensor) -> Tensor:
        ctx.zeros = zeros
        return scores.detach()

    @staticmethod
    def backward(ctx: Any, *of_scores: Tensor) -> tuple[Tensor | None, ...]:
        # Only what nobody else holds becomes a gradient without a copy: a new alias.
        return of_scores[0], ctx.zeros.detach(), None


class _Link:
    """A forward hook of a head, through which its backward reaches what it has taken in."""

    def __init__(self) -> None:
        self._zeros = torch.zeros(0)

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...], scores: Tensor) -> Tensor:
        if self._zeros.shape != inputs[0].shape:
            self._zeros = torch.zeros(inputs[0].shape)
        linked: Tensor = _Residuals.apply(  # type: ignore[no-untyped-call]
            scores, inputs[0], self._zeros
        )
        return linked


def stand_in(model: str, first: str, pace: Pace) -> tuple[PacedWhole, Halves]:
    """Return what stands in for the model of that name, the same in every process of a rehearsal.

    `first` is the head's first layer. InvalidInput if the model cannot be described or paced.
    """
    workload = workload_of(model, pace.samples, pace.input_shape)
    parts = split(workload, Wheel(head=first))
    return paced_halves(parts, pace.forward_s, pace.backward_s, pace.update_s, NUM_CLASSES)


def paced_halves(
    parts: Split,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    update_s: float,
    num_classes: int = 1,
) -> tuple[PacedWhole, Halves]:
    """Return a stand-in for the whole model, whose parameters its halves share, and the halves.

    Both sequences are the seconds of the whole model's layers, in forward order: the body's and
    then the head's (`core.pace.LayerTimes` has them). The body hands on as many values of each
    sample as the real one, and the head returns as many residuals; all are zeros. Errors are those
    of `models.paced.paced`.
    """
    count = len(parts.body.layers)
    values = parts.crossing_nbytes // (_FLOAT32_NBYTES * parts.body.batch_size)
    body = paced(parts.body, forward_s[:count], backward_s[:count], 0.0, values)
    head = paced(parts.head, forward_s[count:], backward_s[count:], update_s, num_classes)
    head.register_forward_hook(_Link())
    in_body, in_head = (tuple(name for name, _ in half.named_parameters()) for half in (body, head))
    first = parts.head.layers[0].name
    return PacedWhole(body, head), Halves(body, head, first, in_body, in_head, (values,))
