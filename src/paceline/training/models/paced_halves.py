"""Paced stand-ins for the two halves of a model.

All values are zero, except gradients for a codec that sends a share of them.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.workload import Workload
from paceline.training.models.halves import Halves
from paceline.training.models.layers import LayerModule, layers_of
from paceline.training.models.paced import PacedModel

_FLOAT32_NBYTES = 4


class PacedWhole(nn.Module):
    """Both halves' parameters under the whole model's names; `update_s` is for `PacedSGD`."""

    def __init__(self, body: PacedModel, head: PacedModel) -> None:
        super().__init__()
        self.update_s = head.update_s
        # The halves' layers, because their modules are called, not the whole's.
        self.layers: tuple[LayerModule, ...] = (*layers_of(body), *layers_of(head))
        for name, parameter in chain(body.named_parameters(), head.named_parameters()):
            *path, own = name.split(".")
            module: nn.Module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(own, parameter)


class _ZeroGradients(torch.autograd.Function):
    """Returns zero gradients for activations, and passes the scores' gradients to the head."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, activations: Tensor) -> Tensor:
        ctx.shape = activations.shape
        return scores.detach()

    @staticmethod
    def backward(ctx: Any, *of_scores: Tensor) -> tuple[Tensor | None, ...]:
        # Autograd avoids a copy only for an unreferenced tensor.
        return of_scores[0], _zeros(ctx.shape).detach()


_zeros = lru_cache(maxsize=2)(torch.zeros)  # an epoch's last batch may be smaller


def paced_halves(
    body_workload: Workload,
    head_workload: Workload,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    update_s: float,
    num_classes: int = 1,
    gradient_like: Callable[[Tensor], Tensor] | None = None,
) -> tuple[PacedWhole, Halves]:
    """Return a paced stand-in for the whole model, and its halves.

    `forward_s`, `backward_s`: seconds of the whole model's layers in forward order, the body's
    before the head's (`core.cost.LayerTimes`). The body outputs as many values per sample as the
    real one, and the head returns as many activation gradients. `gradient_like` makes the body's
    gradients. Errors are those of `PacedModel`.
    """
    count = len(body_workload.layers)
    values = head_workload.input_nbytes // (_FLOAT32_NBYTES * body_workload.batch_size)
    times = forward_s[:count], backward_s[:count], 0.0
    body = PacedModel(body_workload, *times, values, gradient_like)
    head = PacedModel(head_workload, forward_s[count:], backward_s[count:], update_s, num_classes)
    # connects the head's backward with the activations
    head.register_forward_hook(lambda _, inputs, scores: _ZeroGradients.apply(scores, inputs[0]))  # type: ignore[no-untyped-call]
    in_body, in_head = (tuple(name for name, _ in half.named_parameters()) for half in (body, head))
    return PacedWhole(body, head), Halves(body, head, in_body, in_head, (values,))
