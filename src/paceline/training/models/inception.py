"""Networks of parallel branches, whose outputs are concatenated: GoogLeNet and Inception-v3.

GoogLeNet: Szegedy et al., "Going deeper with convolutions", 2014. Inception-v3: Szegedy et al.,
"Rethinking the Inception architecture", 2015.
"""

from collections import OrderedDict
from functools import partial

import torch
from torch import Tensor, nn

from paceline.training.models.networks import he_normal_, pooled_classifier, response_norm

# Channels of each inception block in the order of the paper's Table 1: 1x1, 3x3 reduce, 3x3,
# 5x5 reduce, 5x5, pool projection.
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


def _conv_relu(in_channels: int, out_channels: int, size: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, size, stride, padding=size // 2), nn.ReLU(inplace=True)
    )


_halving_pool = partial(nn.MaxPool2d, 3, stride=2, ceil_mode=True)


class InceptionBlock(nn.Module):
    """Four parallel branches, concatenated along the channels.

    `widths`: the channels of the block's convolutions, a row of `_WIDTHS`.
    """

    def __init__(self, in_channels: int, widths: tuple[int, ...]) -> None:
        super().__init__()
        one, reduce3, three, reduce5, five, projection = widths
        self.branch1 = _conv_relu(in_channels, one, 1)
        self.branch3 = nn.Sequential(
            _conv_relu(in_channels, reduce3, 1), _conv_relu(reduce3, three, 3)
        )
        self.branch5 = nn.Sequential(
            _conv_relu(in_channels, reduce5, 1), _conv_relu(reduce5, five, 5)
        )
        self.branch_pool = nn.Sequential(
            nn.MaxPool2d(3, stride=1, padding=1), _conv_relu(in_channels, projection, 1)
        )
        self.out_channels = one + three + five + projection

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of all branches, concatenated along the channels."""
        return torch.cat([branch(x) for branch in self.children()], dim=1)


class GoogLeNet(nn.Sequential):
    """GoogLeNet without its two auxiliary classifiers: (N, 3, 224, 224) to (N, `num_classes`)."""

    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = _conv_relu(3, 64, size=7, stride=2)
        self.pool1 = nn.Sequential(_halving_pool(), response_norm())
        self.conv2 = nn.Sequential(_conv_relu(64, 64, size=1), _conv_relu(64, 192, size=3))
        self.pool2 = nn.Sequential(response_norm(), _halving_pool())
        channels, blocks = 192, OrderedDict[str, nn.Module]()
        for name, widths in _WIDTHS.items():
            if name in {"4a", "5a"}:
                blocks[f"pool{name[0]}"] = _halving_pool()
            blocks[name] = block = InceptionBlock(channels, widths)
            channels = block.out_channels
        self.inceptions = nn.Sequential(blocks)
        self.classifier = pooled_classifier(channels, num_classes, dropout=0.4)
        he_normal_(self)


_Size = int | tuple[int, int]
# A convolution: output channels, kernel size, and stride (1 if omitted).
_Convolution = tuple[int, _Size] | tuple[int, _Size, int]


def _conv(
    in_channels: int, out_channels: int, size: _Size, stride: int = 1, pad: bool = True
) -> nn.Sequential:
    """Build a convolution with batch norm and ReLU, padded if `pad` is true and the stride is 1."""
    rows, columns = (size, size) if isinstance(size, int) else size
    padding = (rows // 2, columns // 2) if pad and stride == 1 else 0
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, size, stride, padding, bias=False),
        nn.BatchNorm2d(out_channels, eps=0.001),
        nn.ReLU(inplace=True),
    )


def _chain(channels: int, *convolutions: _Convolution) -> nn.Sequential:
    layers = []
    for convolution in convolutions:
        layers.append(_conv(channels, *convolution))
        channels = convolution[0]
    return nn.Sequential(*layers)


def _pool_branch(channels: int, projection: int) -> nn.Sequential:
    return nn.Sequential(nn.AvgPool2d(3, stride=1, padding=1), _conv(channels, projection, 1))


class Branches(nn.Module):
    """Parallel branches on one input; their outputs are concatenated along the channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of all branches, concatenated along the channels."""
        return torch.cat([branch(x) for branch in self.branches], dim=1)


def _grid35(channels: int, projection: int) -> Branches:
    """Build a block for 35x35 pixels, with a 5x5 branch and a branch of two 3x3 convolutions."""
    return Branches(
        _conv(channels, 64, 1),
        _chain(channels, (48, 1), (64, 5)),
        _chain(channels, (64, 1), (96, 3), (96, 3)),
        _pool_branch(channels, projection),
    )


def _grid17(width: int) -> Branches:
    """Build the block of the paper's Figure 6: 7x7 convolutions, each factorised into 1x7 and 7x1.

    `width`: number of channels between the convolutions of a branch.
    """
    row, column = (width, (1, 7)), (width, (7, 1))
    return Branches(
        _conv(768, 192, 1),
        _chain(768, (width, 1), row, (192, (7, 1))),
        _chain(768, (width, 1), column, row, column, (192, (1, 7))),
        _pool_branch(768, 192),
    )


def _grid8(channels: int) -> Branches:
    """Build the paper's Figure 7 block: two branches end in parallel 1x3 and 3x1 convolutions."""
    return Branches(
        _conv(channels, 320, 1),
        nn.Sequential(_conv(channels, 384, 1), _split8()),
        nn.Sequential(_conv(channels, 448, 1), _conv(448, 384, 3), _split8()),
        _pool_branch(channels, 192),
    )


def _split8() -> Branches:
    return Branches(_conv(384, 384, (1, 3)), _conv(384, 384, (3, 1)))


class InceptionV3(nn.Sequential):
    """Inception-v3 without its auxiliary classifier: (N, 3, 299, 299) to (N, `num_classes`).

    Its stages have grids of 35x35, 17x17 and 8x8 pixels. A block between two stages has a stride of
    2 in all branches.
    """

    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            _conv(3, 32, 3, stride=2),
            _conv(32, 32, 3, pad=False),
            _conv(32, 64, 3),
            nn.MaxPool2d(3, stride=2),
            _conv(64, 80, 1),
            _conv(80, 192, 3, pad=False),
            nn.MaxPool2d(3, stride=2),
        )
        self.grid35 = nn.Sequential(_grid35(192, 32), _grid35(256, 64), _grid35(288, 64))
        to_grid17 = Branches(
            _conv(288, 384, 3, stride=2),
            _chain(288, (64, 1), (96, 3), (96, 3, 2)),
            nn.MaxPool2d(3, stride=2),
        )
        self.grid17 = nn.Sequential(
            to_grid17, _grid17(128), _grid17(160), _grid17(160), _grid17(192)
        )
        to_grid8 = Branches(
            _chain(768, (192, 1), (320, 3, 2)),
            _chain(768, (192, 1), (192, (1, 7)), (192, (7, 1)), (192, 3, 2)),
            nn.MaxPool2d(3, stride=2),
        )
        self.grid8 = nn.Sequential(to_grid8, _grid8(1280), _grid8(2048))
        self.classifier = pooled_classifier(2048, num_classes, dropout=0.5)
        he_normal_(self)
