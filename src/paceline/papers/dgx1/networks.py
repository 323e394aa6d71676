"""The paper's five networks: those of `paceline.models` that come nearest."""

from functools import cache

import torch
from torch import nn

from paceline.core.workload import Workload
from paceline.models import find
from paceline.models.googlenet import Inception
from paceline.models.workload import workload_of
from paceline.papers.dgx1.printed import Counts

_NAMES = {
    "LeNet": "lenet5",
    "AlexNet": "alexnet",
    "GoogLeNet": "googlenet",
    "Inception-v3": "inception-v3",
    "ResNet": "resnet110",
}
# Table I's ResNet has 110 layers, which the published one of 110 layers has, and 55M weights on
# images of 299x299 (section IV-C), which it does not have. What GPU 0 holds in addition in table IV
# are three gradients of ResNet-50.
_TRAINED = _NAMES | {"ResNet": "resnet50"}
_LARGE_IMAGES = (3, 299, 299)


@cache
def workload(network: str, batch_size: int) -> Workload:
    """Return what a GPU does in a step of the network that the paper is taken to have trained."""
    shape = _LARGE_IMAGES if network == "ResNet" else None
    return workload_of(_TRAINED[network], batch_size, shape)


def counts(network: str) -> Counts:
    """Return Table I's counts for the published network of that name.

    Layers are those on the longest way through the network, as publications count them;
    convolutions are those outside of inception blocks.
    """
    with torch.device("meta"):
        model = find(_NAMES[network]).build(None)
    outside = list(_outside_blocks(model))
    return Counts(
        layers=_depth(model),
        convolutions=sum(isinstance(module, nn.Conv2d) for module in outside),
        inceptions=sum(_is_parallel(module) for module in outside),
        fully_connected=sum(isinstance(module, nn.Linear) for module in outside),
        weights=sum(parameter.numel() for parameter in model.parameters()),
    )


def _is_parallel(module: nn.Module) -> bool:
    return isinstance(module, Inception | nn.ModuleList)


def _outside_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the module and what is in it, but nothing that is within parallel branches."""
    if _is_parallel(module):
        return [module]
    return [module, *(found for child in module.children() for found in _outside_blocks(child))]


def _depth(module: nn.Module) -> int:
    """Return the number of layers on the longest way through the module."""
    if isinstance(module, nn.Conv2d | nn.Linear):
        return 1
    inner = [_depth(child) for child in module.children()]
    return max(inner) if _is_parallel(module) else sum(inner)
