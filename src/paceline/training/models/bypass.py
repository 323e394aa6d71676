"""A body that is the whole model, but for its last layer, which hands on what it would get.

So a forward pass may do what it likes before that layer: assertions, loops, optional arguments. It
suits a head of one linear layer whose result is what the model returns. Whether that is so shows
when the body runs, and is looked after in every step.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.errors import InvalidInput
from paceline.training.data.batch import call


class _HandOver(nn.Module):
    """Stands in a layer's place, and keeps what that would get."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[Tensor] = []

    def forward(self, values: Tensor) -> Tensor:
        """Return the values as they are."""
        self.taken.append(values)
        return values


@torch.no_grad()
def bypassed(model: nn.Module, name: str, inputs: Any) -> nn.Module | None:
    """Return a model without the layer of that name; None if it returns something else than that.

    It shares all other modules with `model`, under the same names. It is tried with `inputs`, in
    evaluation mode. In training it raises InvalidInput where it does not return, in some step, what
    the layer would get.
    """
    instead = _HandOver()
    body = _without(model, name, instead)
    body._forward_hooks = type(model._forward_hooks)(model._forward_hooks)  # the model's stay

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
    except Exception:  # it looks at what the layer gives
        return None
    finally:
        body.train(was_training)
    return body


def _without(model: nn.Module, name: str, instead: nn.Module) -> nn.Module:
    own = copy.copy(model)
    own._modules = dict(own._modules)
    child, _, rest = name.partition(".")
    within = own._modules[child]
    assert within is not None  # the name is that of a layer
    own._modules[child] = _without(within, rest, instead) if rest else instead
    return own
