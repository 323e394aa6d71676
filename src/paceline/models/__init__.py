"""Networks, the search for a network by name, and their description as workloads."""

from paceline.models.alexnet import AlexNet
from paceline.models.describe import describe
from paceline.models.factory import Architecture, find, names
from paceline.models.googlenet import GoogLeNet
from paceline.models.inception import InceptionV3
from paceline.models.layers import LayerModule, layers_of
from paceline.models.lenet import LeNet5
from paceline.models.mlp import MLP, SigmoidMLP
from paceline.models.resnet import (
    CifarResNet,
    ResNet,
    resnet18,
    resnet50,
    resnet101,
    resnet110,
    resnet152,
)
from paceline.models.vgg import VGG16

__all__ = [
    "MLP",
    "VGG16",
    "AlexNet",
    "Architecture",
    "CifarResNet",
    "GoogLeNet",
    "InceptionV3",
    "LayerModule",
    "LeNet5",
    "ResNet",
    "SigmoidMLP",
    "describe",
    "find",
    "layers_of",
    "names",
    "resnet18",
    "resnet50",
    "resnet101",
    "resnet110",
    "resnet152",
]
