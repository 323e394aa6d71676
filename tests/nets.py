"""Small models for tests that analyse models."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import nn

from paceline.training.models.networks import BasicBlock, pooled_classifier


class Net(nn.Module):
    """A model with the given parts, whose forward is `compute(net, *inputs)`."""

    def __init__(self, compute: Callable[..., Any], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self._compute = compute

    def forward(self, *inputs: Any) -> Any:
        return self._compute(self, *inputs)


def residual() -> nn.Sequential:
    """Build three residual blocks, two of which halve the image: (N, 3, H, W) to (N, 10)."""
    blocks = [BasicBlock(16, 16, 1, nn.Identity())]
    for width in (32, 64):
        shortcut = nn.Conv2d(width // 2, width, 1, stride=2)
        blocks.append(BasicBlock(width // 2, width, 2, shortcut))
    stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
    parts = {"stem": stem, "blocks": nn.Sequential(*blocks)}
    return nn.Sequential(OrderedDict(parts | {"classifier": pooled_classifier(64, 10)}))
