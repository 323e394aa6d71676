"""A model of given parts, for tests of what is found in models."""

from collections.abc import Callable
from typing import Any

from torch import nn


class Net(nn.Module):
    """A model of these parts in their order, which `compute(net, *inputs)` puts together."""

    def __init__(self, compute: Callable[..., Any], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self._compute = compute

    def forward(self, *inputs: Any) -> Any:
        return self._compute(self, *inputs)
