"""The initial weights of the deep networks with rectifiers, and with sigmoids."""

from math import sqrt

import torch
from torch import nn

_SIGMOID_GAIN = 6.0


def he_normal_(model: nn.Module) -> None:
    """Draw all convolution and fully-connected weights as in He et al. 2015; set biases to zero.

    The variance is 2 / fan_in, which keeps the activations of a deep network with rectifiers at
    one scale. PyTorch's own initial weights have a sixth of that, too little for VGG-16 to learn.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def centred_normal_(model: nn.Module) -> None:
    """Draw all fully-connected weights for sigmoids without biases.

    The standard deviation is 6 / sqrt(inputs), as a sigmoid's slope is at most 1/4. Its mean is
    1/2: a unit whose weights did not sum up to zero would be driven by that alone, the same for
    every sample, so each unit's mean weight is subtracted.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=_SIGMOID_GAIN / sqrt(module.in_features))
            with torch.no_grad():
                module.weight -= module.weight.mean(1, keepdim=True)
