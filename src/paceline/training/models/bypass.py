"""A model without its last layer: returns that layer's input.

The forward pass before that layer may contain anything: assertions, loops, optional arguments. This
works if the model returns the layer's output, which is checked in every step.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.errors import InvalidInput
from paceline.training.data.batch import call


class _HandOver(nn.Module):
    """Replaces a layer, and keeps its input."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[Tensor] = []

    def forward(self, values: Tensor) -> Tensor:
        """Return the values unchanged."""
        self.taken.append(values)
        return values


@torch.no_grad()
def bypassed(model: nn.Module, name: str, inputs: Any) -> nn.Module | None:
    """Return the model without a layer; None if it does not return that layer's output.

    The result shares all other modules with `model`, under the same names. It is tried with
    `inputs` in evaluation mode. In training it raises InvalidInput in a step that does not return
    the layer's input.
    """
    instead = _HandOver()
    body = _without(model, name, instead)
    body._forward_hooks = type(model._forward_hooks)(model._forward_hooks)  # not shared

    def check(module: nn.Module, arguments: Any, found: Any) -> None:
        taken, instead.taken = instead.taken, []
        if len(taken) != 1 or found is not taken[0]:
            raise InvalidInput(
                "head",
                f"the model must return what layer {name!r} gives, and call that once",
                hint=(
                    f"in this step it has called it {len(taken)} times, or returned something else"
                ),
            )

    body.register_forward_hook(check)
    was_training = model.training
    try:
        call(body.eval(), inputs)
    except Exception:  # the model uses the layer's output
        return None
    finally:
        body.train(was_training)
    return body


def _without(model: nn.Module, name: str, instead: nn.Module) -> nn.Module:
    own = copy.copy(model)
    own._modules = dict(own._modules)
    child, _, rest = name.partition(".")
    within = own._modules[child]
    assert within is not None  # `name` is a layer's
    own._modules[child] = _without(within, rest, instead) if rest else instead
    return own
