"""The networks of Le et al. 2018 with layers as its Table 1 counts them: 8, 22, 16 and 152.

Strategy host synchronises once a layer in the paper. A convolution and its batch normalisation are
one layer there, and so are the convolutions of an inception block that stand side by side.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from paceline.core.pace import LayerTimes
from paceline.core.workload import Cost, Layer, Workload
from paceline.models.googlenet import GoogLeNet
from paceline.models.workload import workload_of

# Section 5.1, Table 1: images of one GPU in one step.
BATCH_SIZES = {"alexnet": 256, "googlenet": 64, "vgg16": 32, "resnet152": 12}
_IMAGE = {"alexnet": (3, 227, 227)}
_USUAL_IMAGE = (3, 224, 224)
_INCEPTION = re.compile(r"inceptions\.(\w+)\.(branch[35]\.1)?")
_BOTTLENECK = re.compile(r"(stages\.\d+\.\d+)\.(conv\d|shortcut)")
_HEADS = {"heads.0": "4a", "heads.1": "4d"}


class TrainedGoogLeNet(GoogLeNet):
    """GoogLeNet as it is trained: with its two auxiliary classifiers, 13,378,280 parameters.

    Images (N, 3, 224, 224) to scores (N, 1000): the main classifier's, then the other two's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([_head(512), _head(528)])

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        """Three scores for each image."""
        x = self.pool2(self.conv2(self.pool1(self.conv1(images))))
        others = []
        for name, block in self.inceptions.named_children():
            x = block(x)
            others += [self.heads[i](x) for i, at in enumerate(_HEADS.values()) if at == name]
        return (self.classifier(x), *others)


def _head(channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.AvgPool2d(5, stride=3),
        nn.Conv2d(channels, 128, kernel_size=1),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(128 * 4 * 4, 1024),
        nn.ReLU(inplace=True),
        nn.Dropout(0.7),
        nn.Linear(1024, 1000),
    )


@dataclass(frozen=True)
class Network:
    """A network as its modules are (`fine`), and as the paper counts layers (`workload`).

    `members` names, for each layer of the latter, those of the former that it stands for.
    """

    fine: Workload
    workload: Workload
    members: Mapping[str, tuple[str, ...]]

    def merged(self, times: LayerTimes) -> LayerTimes:
        """Return the seconds of the paper's layers, given those of the modules."""
        return LayerTimes(
            self._summed(times.forward_s), self._summed(times.backward_s), times.update_s
        )

    def _summed(self, seconds: Sequence[float]) -> tuple[float, ...]:
        by_name = dict(zip((layer.name for layer in self.fine.layers), seconds, strict=True))
        return tuple(
            sum(by_name[name] for name in self.members[layer.name])
            for layer in self.workload.layers
        )


@cache
def network(name: str, batch_size: int | None = None) -> Network:
    """Return a network of Table 1, on as many images as there or on `batch_size`."""
    size = batch_size or BATCH_SIZES[name]
    if name == "googlenet":
        with torch.device("meta"):
            model: str | nn.Module = TrainedGoogLeNet()
    else:
        model = name
    return _merge(workload_of(model, size, _IMAGE.get(name, _USUAL_IMAGE)))


def layer_of(module: str) -> str:
    """Return to which of the paper's layers a module belongs."""
    for head, block in _HEADS.items():
        if module.startswith(head):
            return f"{block}.second"  # computed and differentiated beside it
    if inception := _INCEPTION.match(module):
        return f"{inception[1]}.{'second' if inception[2] else 'first'}"
    if bottleneck := _BOTTLENECK.match(module):
        layer = "conv3" if bottleneck[2] == "shortcut" else bottleneck[2]
        return f"{bottleneck[1]}.{layer}"
    return "stem" if module.startswith("stem.") else module


def _merge(fine: Workload) -> Network:
    members: dict[str, list[Layer]] = defaultdict(list)
    for layer in fine.layers:
        members[layer_of(layer.name)].append(layer)
    names = list(members)
    # A layer's gradients are ready when those of its last module are.
    ready = {layer_of(layer.name): i for i, layer in enumerate(fine.in_backward_order)}
    order = sorted(range(len(names)), key=lambda i: ready[names[i]])
    workload = Workload(
        fine.name,
        fine.batch_size,
        tuple(_merged(name, layers) for name, layers in members.items()),
        tuple(order),
        fine.input_nbytes,
    )
    own = {name: tuple(layer.name for layer in layers) for name, layers in members.items()}
    return Network(fine, workload, own)


def _merged(name: str, layers: Sequence[Layer]) -> Layer:
    return Layer(
        name,
        tuple(parameter for layer in layers for parameter in layer.parameters),
        layers[-1].activation_nbytes,
        sum((layer.forward for layer in layers), Cost()),
        sum((layer.backward for layer in layers), Cost()),
    )
