"""GoogLeNet, or Inception v1 (Szegedy et al., "Going deeper with convolutions", 2014)."""

from collections import OrderedDict

import torch
from torch import Tensor, nn

from paceline.models.initialize import he_normal_

# Per inception block, in the order of the paper's Table 1: 1x1, 3x3 reduce, 3x3, 5x5 reduce, 5x5,
# and the projection behind the pooling.
_WIDTHS = {
    "3a": (64, 96, 128, 16, 32, 32),
    "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64),
    "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64),
    "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128),
    "5a": (256, 160, 320, 32, 128, 128),
    "5b": (384, 192, 384, 48, 128, 128),
}


def _conv(in_channels: int, out_channels: int, size: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, size, stride, padding=size // 2),
        nn.ReLU(inplace=True),
    )


def _pool() -> nn.MaxPool2d:
    return nn.MaxPool2d(3, stride=2, ceil_mode=True)


def _normalize() -> nn.LocalResponseNorm:
    return nn.LocalResponseNorm(size=5, alpha=1e-4, beta=0.75, k=1.0)


class Inception(nn.Module):
    """Four parallel branches whose outputs are concatenated; `widths` as in the paper's Table 1."""

    def __init__(self, in_channels: int, widths: tuple[int, ...]) -> None:
        super().__init__()
        one, reduce3, three, reduce5, five, projection = widths
        self.branch1 = _conv(in_channels, one, 1)
        self.branch3 = nn.Sequential(_conv(in_channels, reduce3, 1), _conv(reduce3, three, 3))
        self.branch5 = nn.Sequential(_conv(in_channels, reduce5, 1), _conv(reduce5, five, 5))
        self.branch_pool = nn.Sequential(
            nn.MaxPool2d(3, stride=1, padding=1), _conv(in_channels, projection, 1)
        )
        self.out_channels = one + three + five + projection

    def forward(self, x: Tensor) -> Tensor:
        """(N, `in_channels`, H, W) to (N, `out_channels`, H, W)."""
        branches = (self.branch1, self.branch3, self.branch5, self.branch_pool)
        return torch.cat([branch(x) for branch in branches], dim=1)


class GoogLeNet(nn.Module):
    """GoogLeNet without its two auxiliary classifiers: (N, 3, 224, 224) to (N, `num_classes`).

    6,998,552 parameters with 1,000 classes.
    """

    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = _conv(3, 64, size=7, stride=2)
        self.pool1 = nn.Sequential(_pool(), _normalize())
        self.conv2 = nn.Sequential(_conv(64, 64, size=1), _conv(64, 192, size=3))
        self.pool2 = nn.Sequential(_normalize(), _pool())
        self.inceptions = self._inceptions(192)
        self.classifier = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.4), nn.Linear(1024, num_classes)
        )
        he_normal_(self)

    @staticmethod
    def _inceptions(channels: int) -> nn.Sequential:
        blocks: OrderedDict[str, nn.Module] = OrderedDict()
        for name, widths in _WIDTHS.items():
            if name in {"4a", "5a"}:
                blocks[f"pool{name[0]}"] = _pool()
            block = Inception(channels, widths)
            blocks[name] = block
            channels = block.out_channels
        return nn.Sequential(blocks)

    def forward(self, images: Tensor) -> Tensor:
        """Scores (N, `num_classes`) of `images` (N, 3, 224, 224)."""
        x = self.pool2(self.conv2(self.pool1(self.conv1(images))))
        scores: Tensor = self.classifier(self.inceptions(x))
        return scores
