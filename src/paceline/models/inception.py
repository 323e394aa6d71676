"""Inception-v3 (Szegedy et al., "Rethinking the Inception architecture", 2015)."""

import torch
from torch import Tensor, nn

from paceline.models.initialize import he_normal_

_Size = int | tuple[int, int]


def _conv(
    in_channels: int, out_channels: int, size: _Size, stride: int = 1, pad: bool = True
) -> nn.Sequential:
    rows, columns = (size, size) if isinstance(size, int) else size
    padding = (rows // 2, columns // 2) if pad else 0
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, size, stride, padding, bias=False),
        nn.BatchNorm2d(out_channels, eps=0.001),
        nn.ReLU(inplace=True),
    )


def _average_pool() -> nn.AvgPool2d:
    return nn.AvgPool2d(3, stride=1, padding=1)


def _reducing_pool() -> nn.MaxPool2d:
    return nn.MaxPool2d(3, stride=2)


class Branches(nn.Module):
    """Parallel branches on one input, their outputs concatenated along the channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) to (N, the sum of the branches' channels, H', W')."""
        return torch.cat([branch(x) for branch in self.branches], dim=1)


def _grid35(channels: int, projection: int) -> Branches:
    """Build a block on 35x35 pixels: in one branch a 5x5 convolution, in another two 3x3."""
    return Branches(
        _conv(channels, 64, 1),
        nn.Sequential(_conv(channels, 48, 1), _conv(48, 64, 5)),
        nn.Sequential(_conv(channels, 64, 1), _conv(64, 96, 3), _conv(96, 96, 3)),
        nn.Sequential(_average_pool(), _conv(channels, projection, 1)),
    )


def _to_grid17(channels: int) -> Branches:
    return Branches(
        _conv(channels, 384, 3, stride=2, pad=False),
        nn.Sequential(
            _conv(channels, 64, 1), _conv(64, 96, 3), _conv(96, 96, 3, stride=2, pad=False)
        ),
        _reducing_pool(),
    )


def _grid17(width: int) -> Branches:
    """Build the paper's Figure 6: 7x7 convolutions as 1x7 and 7x1 ones, `width` inside."""
    return Branches(
        _conv(768, 192, 1),
        nn.Sequential(_conv(768, width, 1), _conv(width, width, (1, 7)), _conv(width, 192, (7, 1))),
        nn.Sequential(
            _conv(768, width, 1),
            _conv(width, width, (7, 1)),
            _conv(width, width, (1, 7)),
            _conv(width, width, (7, 1)),
            _conv(width, 192, (1, 7)),
        ),
        nn.Sequential(_average_pool(), _conv(768, 192, 1)),
    )


def _to_grid8() -> Branches:
    return Branches(
        nn.Sequential(_conv(768, 192, 1), _conv(192, 320, 3, stride=2, pad=False)),
        nn.Sequential(
            _conv(768, 192, 1),
            _conv(192, 192, (1, 7)),
            _conv(192, 192, (7, 1)),
            _conv(192, 192, 3, stride=2, pad=False),
        ),
        _reducing_pool(),
    )


def _grid8(channels: int) -> Branches:
    """Build the paper's Figure 7: branches that split once more into 1x3 and 3x1."""
    return Branches(
        _conv(channels, 320, 1),
        nn.Sequential(
            _conv(channels, 384, 1), Branches(_conv(384, 384, (1, 3)), _conv(384, 384, (3, 1)))
        ),
        nn.Sequential(
            _conv(channels, 448, 1),
            _conv(448, 384, 3),
            Branches(_conv(384, 384, (1, 3)), _conv(384, 384, (3, 1))),
        ),
        nn.Sequential(_average_pool(), _conv(channels, 192, 1)),
    )


class InceptionV3(nn.Module):
    """Inception-v3 without its auxiliary classifier: (N, 3, 299, 299) to (N, `num_classes`).

    23,834,568 parameters with 1,000 classes.
    """

    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            _conv(3, 32, 3, stride=2, pad=False),
            _conv(32, 32, 3, pad=False),
            _conv(32, 64, 3),
            _reducing_pool(),
            _conv(64, 80, 1),
            _conv(80, 192, 3, pad=False),
            _reducing_pool(),
        )
        self.grid35 = nn.Sequential(_grid35(192, 32), _grid35(256, 64), _grid35(288, 64))
        self.grid17 = nn.Sequential(
            _to_grid17(288), _grid17(128), _grid17(160), _grid17(160), _grid17(192)
        )
        self.grid8 = nn.Sequential(_to_grid8(), _grid8(1280), _grid8(2048))
        self.classifier = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.5), nn.Linear(2048, num_classes)
        )
        he_normal_(self)

    def forward(self, images: Tensor) -> Tensor:
        """Scores (N, `num_classes`) of `images` (N, 3, 299, 299)."""
        scores: Tensor = self.classifier(self.grid8(self.grid17(self.grid35(self.stem(images)))))
        return scores
