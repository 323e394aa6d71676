"""Convolutional and residual networks, perceptrons, and He initialisation.

ResNet: He et al., "Deep residual learning for image recognition", 2015.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_SIGMOID_GAIN = 6.0
# Output channels of the 3x3 convolutions in each block; each block ends in a 2x2 pooling.
_BLOCKS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


def he_normal_(model: nn.Module) -> None:
    """Initialise convolutions and linear layers as He et al. 2015, with zero biases.

    PyTorch's default variance is a sixth of He's variance, too small for VGG-16 to learn.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


class LeNet5(nn.Sequential):
    """LeNet-5 in its common modern form: images (N, 1, 32, 32) to scores (N, `num_classes`)."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, kernel_size=5)
        self.tanh1 = nn.Tanh()
        self.pool1 = nn.AvgPool2d(2)
        self.conv2 = nn.Conv2d(6, 16, kernel_size=5)
        self.tanh2 = nn.Tanh()
        self.pool2 = nn.AvgPool2d(2)
        self.flatten = nn.Flatten()
        self.fc3 = nn.Linear(16 * 5 * 5, 120)
        self.tanh3 = nn.Tanh()
        self.fc4 = nn.Linear(120, 84)
        self.tanh4 = nn.Tanh()
        self.fc5 = nn.Linear(84, num_classes)


# Local response normalisation with the constants of Caffe.
response_norm = partial(nn.LocalResponseNorm, size=5, alpha=1e-4, beta=0.75, k=1.0)


def pooled_classifier(
    channels: int, num_classes: int, dropout: float | None = None
) -> nn.Sequential:
    """Build average pooling and a classifier: (N, `channels`, H, W) to (N, `num_classes`)."""
    drop = [] if dropout is None else [nn.Dropout(dropout)]
    return nn.Sequential(
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), *drop, nn.Linear(channels, num_classes)
    )


def _wide_classifier(inputs: int, num_classes: int) -> nn.Sequential:
    """Build the three final linear layers of AlexNet and VGG-16."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(inputs, 4096),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
        nn.Linear(4096, 4096),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
        nn.Linear(4096, num_classes),
    )


class AlexNet(nn.Sequential):
    """AlexNet on one device, as in Caffe's bvlc_alexnet: (N, 3, 227, 227) to (N, `num_classes`).

    The second, the fourth and the fifth convolution have two groups each, because the original
    network was divided between two GPUs.
    """

    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 96, kernel_size=11, stride=4),
            nn.ReLU(inplace=True),
            response_norm(),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(96, 256, kernel_size=5, padding=2, groups=2),
            nn.ReLU(inplace=True),
            response_norm(),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(256, 384, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(384, 384, kernel_size=3, padding=1, groups=2),
            nn.ReLU(inplace=True),
            nn.Conv2d(384, 256, kernel_size=3, padding=1, groups=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2),
        )
        self.classifier = _wide_classifier(256 * 6 * 6, num_classes)
        he_normal_(self)


class VGG16(nn.Sequential):
    """VGG-16: images (N, 3, 224, 224) to scores (N, `num_classes`)."""

    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for widths in _BLOCKS:
            for width in widths:
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
                channels = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = _wide_classifier(512 * 7 * 7, num_classes)
        he_normal_(self)


class MLP(nn.Sequential):
    """Multilayer perceptron with ReLU activations.

    `widths`: the number of units of every layer from input to output, such as (54, 512, 512, 2).
    """

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.layers = _fully_connected(widths, bias=True, activation=partial(nn.ReLU, inplace=True))
        he_normal_(self)


class SigmoidMLP(nn.Sequential):
    """Multilayer perceptron with sigmoids, without biases, as in Ma, Rusu et al. 2020, VII-A."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.layers = _fully_connected(widths, bias=False, activation=nn.Sigmoid)
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                # A sigmoid's slope is at most 1/4, so the weights are larger than for ReLU.
                nn.init.normal_(layer.weight, std=_SIGMOID_GAIN / sqrt(layer.in_features))
                with torch.no_grad():
                    # Make each unit's weights add up to zero. This cancels the mean of the inputs,
                    # which is about 1/2 after sigmoids.
                    layer.weight -= layer.weight.mean(1, keepdim=True)


def _fully_connected(
    widths: Sequence[int], *, bias: bool, activation: Callable[[], nn.Module]
) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs, bias=bias), activation()]
    return nn.Sequential(*layers[:-1])


def _conv_norm(in_channels: int, out_channels: int, size: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, size, stride, padding=size // 2, bias=False),
        nn.BatchNorm2d(out_channels),
    )


class BasicBlock(nn.Module):
    """Residual block of two 3x3 convolutions and a shortcut."""

    expansion = 1

    def __init__(self, in_channels: int, width: int, stride: int, shortcut: nn.Module) -> None:
        super().__init__()
        self.conv1 = _conv_norm(in_channels, width, 3, stride)
        self.conv2 = _conv_norm(width, width, 3)
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, `in_channels`, H, W) to (N, `width`, H / `stride`, W / `stride`)."""
        return F.relu(self.conv2(F.relu(self.conv1(x))) + self.shortcut(x))


class Bottleneck(nn.Module):
    """Residual block of 1x1, 3x3 and 1x1 convolutions; the first convolution has the stride."""

    expansion = 4

    def __init__(self, in_channels: int, width: int, stride: int, shortcut: nn.Module) -> None:
        super().__init__()
        self.conv1 = _conv_norm(in_channels, width, 1, stride)
        self.conv2 = _conv_norm(width, width, 3)
        self.conv3 = _conv_norm(width, width * self.expansion, 1)
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, `in_channels`, H, W) to (N, 4 `width`, H / `stride`, W / `stride`)."""
        inner = F.relu(self.conv2(F.relu(self.conv1(x))))
        return F.relu(self.conv3(inner) + self.shortcut(x))


class ResNet(nn.Sequential):
    """ResNet for ImageNet: images (N, 3, 224, 224) to scores (N, `num_classes`).

    `blocks`: number of residual blocks in each of the four stages. Shortcuts that change the shape
    are 1x1 convolutions (option B). Images must have at least 32x32 pixels.
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
            width, stride = 64 << stage, 2 if stage else 1
            out_channels = width * block.expansion
            same = stride == 1 and channels == out_channels
            shortcut = nn.Identity() if same else _conv_norm(channels, out_channels, 1, stride)
            first = block(channels, width, stride, shortcut)
            rest = (block(out_channels, width, 1, nn.Identity()) for _ in range(count - 1))
            stages.append(nn.Sequential(first, *rest))
            channels = out_channels
        self.stages = nn.Sequential(*stages)
        self.classifier = pooled_classifier(channels, num_classes)
        he_normal_(self)


resnet18 = partial(ResNet, BasicBlock, (2, 2, 2, 2))
resnet50 = partial(ResNet, Bottleneck, (3, 4, 6, 3))
