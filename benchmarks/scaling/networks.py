"""The five networks of Mojumder et al. 2018, on images so small that two cores can train them.

All have the weights of the networks as they are, but ten classes.
"""

from torch import nn

from paceline.training.models.inception import GoogLeNet, InceptionV3
from paceline.training.models.networks import AlexNet, LeNet5, resnet50

_CLASSES = 10
SHAPES = {
    "lenet": "1x32x32",
    "alexnet": "3x67x67",
    "googlenet": "3x64x64",
    "inception": "3x75x75",
    "resnet": "3x64x64",
}


def lenet() -> nn.Module:
    """Return LeNet-5, on its own images."""
    return LeNet5(_CLASSES)


def alexnet() -> nn.Module:
    """Return AlexNet, whose classifier sees each of the few features that are left several times.

    So it keeps its 54 million weights there.
    """
    model = AlexNet(_CLASSES)
    model.features.append(nn.AdaptiveAvgPool2d(6))
    return model


def googlenet() -> nn.Module:
    """Return GoogLeNet."""
    return GoogLeNet(_CLASSES)


def inception() -> nn.Module:
    """Return Inception-v3, on the smallest images that it takes."""
    return InceptionV3(_CLASSES)


def resnet() -> nn.Module:
    """Return ResNet-50, which is the ResNet of table IV."""
    return resnet50(_CLASSES)
