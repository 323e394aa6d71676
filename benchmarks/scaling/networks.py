"""Build the five networks of Mojumder et al. 2018 for small images.

Two cores can train on these images. Weights have their original shapes, except for ten classes.
"""

from functools import partial

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


lenet = partial(LeNet5, _CLASSES)
googlenet = partial(GoogLeNet, _CLASSES)
inception = partial(InceptionV3, _CLASSES)  # the smallest images that it accepts
resnet = partial(resnet50, _CLASSES)  # the ResNet of table IV


def alexnet() -> nn.Module:
    """Return AlexNet, with small feature maps enlarged to 6x6 by average pooling.

    The classifier thus keeps its 54 million weights.
    """
    model = AlexNet(_CLASSES)
    model.features.append(nn.AdaptiveAvgPool2d(6))
    return model
