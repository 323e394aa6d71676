"""Residual networks (He et al., "Deep residual learning for image recognition", 2015)."""

import torch.nn.functional as F
from torch import Tensor, nn

from paceline.models.initialize import he_normal_


def _conv_norm(in_channels: int, out_channels: int, size: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, size, stride, padding=size // 2, bias=False),
        nn.BatchNorm2d(out_channels),
    )


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    expansion = 1

    def __init__(self, in_channels: int, width: int, stride: int, shortcut: nn.Module) -> None:
        super().__init__()
        self.conv1 = _conv_norm(in_channels, width, 3, stride)
        self.conv2 = _conv_norm(width, width, 3)
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        """(N, `in_channels`, H, W) to (N, `width`, H / `stride`, W / `stride`)."""
        return F.relu(self.conv2(F.relu(self.conv1(x))) + self.shortcut(x))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut; the first one has the stride."""

    expansion = 4

    def __init__(self, in_channels: int, width: int, stride: int, shortcut: nn.Module) -> None:
        super().__init__()
        self.conv1 = _conv_norm(in_channels, width, 1, stride)
        self.conv2 = _conv_norm(width, width, 3)
        self.conv3 = _conv_norm(width, width * self.expansion, 1)
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        """(N, `in_channels`, H, W) to (N, 4 `width`, H / `stride`, W / `stride`)."""
        inner = F.relu(self.conv2(F.relu(self.conv1(x))))
        return F.relu(self.conv3(inner) + self.shortcut(x))


class PaddedShortcut(nn.Module):
    """The parameterless shortcut (option A): every second pixel, and zeros as new channels."""

    def __init__(self, new_channels: int) -> None:
        super().__init__()
        self.new_channels = new_channels

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) to (N, C + `new_channels`, H / 2, W / 2)."""
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, self.new_channels))


class ResNet(nn.Module):
    """The ImageNet form: images (N, 3, 224, 224) to scores (N, `num_classes`).

    `blocks` are the residual blocks of the four stages. Where a stage changes the shape, the
    shortcut is a 1x1 convolution (option B). Any image of at least 32x32 pixels will do.
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        blocks: tuple[int, int, int, int],
        num_classes: int = 1000,
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            _conv_norm(3, 64, 7, stride=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)
        )
        channels, stages = 64, []
        for stage, count in enumerate(blocks):
            width = 64 << stage
            stages.append(self._stage(block, channels, width, count, stride=2 if stage else 1))
            channels = width * block.expansion
        self.stages = nn.Sequential(*stages)
        self.classifier = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes)
        )
        he_normal_(self)

    @staticmethod
    def _stage(
        block: type[BasicBlock] | type[Bottleneck],
        channels: int,
        width: int,
        count: int,
        stride: int,
    ) -> nn.Sequential:
        out_channels = width * block.expansion
        same = stride == 1 and channels == out_channels
        shortcut = nn.Identity() if same else _conv_norm(channels, out_channels, 1, stride)
        first = block(channels, width, stride, shortcut)
        rest = (block(out_channels, width, 1, nn.Identity()) for _ in range(count - 1))
        return nn.Sequential(first, *rest)

    def forward(self, images: Tensor) -> Tensor:
        """Scores (N, `num_classes`) of `images` (N, 3, 224, 224)."""
        scores: Tensor = self.classifier(self.stages(self.stem(images)))
        return scores


class CifarResNet(nn.Module):
    """The CIFAR-10 form of 6 n + 2 layers: images (N, 3, 32, 32) to scores (N, `num_classes`).

    Three stages of `n` basic blocks, 16, 32 and 64 wide, with parameterless shortcuts (option A).
    """

    def __init__(self, n: int, num_classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(_conv_norm(3, 16, 3), nn.ReLU(inplace=True))
        blocks = [BasicBlock(16, 16, 1, nn.Identity()) for _ in range(n)]
        for width in (32, 64):
            blocks.append(BasicBlock(width // 2, width, 2, PaddedShortcut(width // 2)))
            blocks += [BasicBlock(width, width, 1, nn.Identity()) for _ in range(n - 1)]
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, num_classes)
        )
        he_normal_(self)

    def forward(self, images: Tensor) -> Tensor:
        """Scores (N, `num_classes`) of `images` (N, 3, 32, 32)."""
        scores: Tensor = self.classifier(self.blocks(self.stem(images)))
        return scores


def resnet18(num_classes: int = 1000) -> ResNet:
    """ResNet-18: 11,689,512 parameters with 1,000 classes."""
    return ResNet(BasicBlock, (2, 2, 2, 2), num_classes)


def resnet50(num_classes: int = 1000) -> ResNet:
    """ResNet-50: 25,557,032 parameters with 1,000 classes."""
    return ResNet(Bottleneck, (3, 4, 6, 3), num_classes)


def resnet101(num_classes: int = 1000) -> ResNet:
    """ResNet-101: 44,549,160 parameters with 1,000 classes."""
    return ResNet(Bottleneck, (3, 4, 23, 3), num_classes)


def resnet152(num_classes: int = 1000) -> ResNet:
    """ResNet-152: 60,192,808 parameters with 1,000 classes."""
    return ResNet(Bottleneck, (3, 8, 36, 3), num_classes)


def resnet110(num_classes: int = 10) -> CifarResNet:
    """ResNet-110 of the CIFAR-10 experiments: 1,727,962 parameters with ten classes."""
    return CifarResNet(18, num_classes)
