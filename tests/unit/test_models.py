"""The built-in networks against their publications, and against closed forms written here."""

import pytest
import torch
from torch import nn

from paceline.models.factory import find
from paceline.models.inception import InceptionBlock
from paceline.models.networks import AlexNet, CifarResNet, LeNet5


def conv(inputs: int, outputs: int, rows: int, columns: int = 0, groups: int = 1) -> int:
    """Weights of a convolution, without bias."""
    return outputs * (inputs // groups) * rows * (columns or rows)


def biased(inputs: int, outputs: int, rows: int, groups: int = 1) -> int:
    return conv(inputs, outputs, rows, groups=groups) + outputs


def full(inputs: int, outputs: int) -> int:
    return (inputs + 1) * outputs


def normed(inputs: int, outputs: int, rows: int, columns: int = 0) -> int:
    """Weights of a convolution without bias and of the batch normalisation behind it."""
    return conv(inputs, outputs, rows, columns) + 2 * outputs


ALEXNET_LAYERS = [
    biased(3, 96, 11),
    biased(96, 256, 5, groups=2),
    biased(256, 384, 3),
    biased(384, 384, 3, groups=2),
    biased(384, 256, 3, groups=2),
    full(256 * 6 * 6, 4096),
    full(4096, 4096),
    full(4096, 1000),
]
VGG16_LAYERS = [
    *(biased(3, 64, 3), biased(64, 64, 3)),
    *(biased(64, 128, 3), biased(128, 128, 3)),
    *(biased(128, 256, 3), 2 * biased(256, 256, 3)),
    *(biased(256, 512, 3), 2 * biased(512, 512, 3)),
    3 * biased(512, 512, 3),
    *(full(512 * 7 * 7, 4096), full(4096, 4096), full(4096, 1000)),
]


def googlenet_block(inputs: int, widths: tuple[int, int, int, int, int, int]) -> int:
    one, reduce3, three, reduce5, five, projection = widths
    return (
        biased(inputs, one, 1)
        + biased(inputs, reduce3, 1)
        + biased(reduce3, three, 3)
        + biased(inputs, reduce5, 1)
        + biased(reduce5, five, 5)
        + biased(inputs, projection, 1)
    )


GOOGLENET_LAYERS = [
    biased(3, 64, 7),
    biased(64, 64, 1) + biased(64, 192, 3),
    googlenet_block(192, (64, 96, 128, 16, 32, 32)),
    googlenet_block(256, (128, 128, 192, 32, 96, 64)),
    googlenet_block(480, (192, 96, 208, 16, 48, 64)),
    googlenet_block(512, (160, 112, 224, 24, 64, 64)),
    googlenet_block(512, (128, 128, 256, 24, 64, 64)),
    googlenet_block(512, (112, 144, 288, 32, 64, 64)),
    googlenet_block(528, (256, 160, 320, 32, 128, 128)),
    googlenet_block(832, (256, 160, 320, 32, 128, 128)),
    googlenet_block(832, (384, 192, 384, 48, 128, 128)),
    full(1024, 1000),
]


def grid35(inputs: int, projection: int) -> int:
    return (
        normed(inputs, 64, 1)
        + (normed(inputs, 48, 1) + normed(48, 64, 5))
        + (normed(inputs, 64, 1) + normed(64, 96, 3) + normed(96, 96, 3))
        + normed(inputs, projection, 1)
    )


def grid17(width: int) -> int:
    inner, last = normed(width, width, 7, 1), normed(width, 192, 7, 1)
    entries = 2 * normed(768, 192, 1) + 2 * normed(768, width, 1)
    return entries + (inner + last) + (3 * inner + last)


def grid8(inputs: int) -> int:
    split = 2 * normed(384, 384, 1, 3)
    return (
        normed(inputs, 320, 1)
        + (normed(inputs, 384, 1) + split)
        + (normed(inputs, 448, 1) + normed(448, 384, 3) + split)
        + normed(inputs, 192, 1)
    )


INCEPTION_LAYERS = [
    normed(3, 32, 3) + normed(32, 32, 3) + normed(32, 64, 3),
    normed(64, 80, 1) + normed(80, 192, 3),
    grid35(192, 32) + grid35(256, 64) + grid35(288, 64),
    normed(288, 384, 3) + normed(288, 64, 1) + normed(64, 96, 3) + normed(96, 96, 3),
    grid17(128) + 2 * grid17(160) + grid17(192),
    2 * normed(768, 192, 1)
    + normed(192, 320, 3)
    + 2 * normed(192, 192, 7, 1)
    + normed(192, 192, 3),
    grid8(1280) + grid8(2048),
    full(2048, 1000),
]


def residual(blocks: tuple[int, ...], expansion: int) -> int:
    """Parameters of an ImageNet ResNet with 1,000 classes, from the paper's Table 1."""
    total, inputs = normed(3, 64, 7), 64
    for stage, count in enumerate(blocks):
        width = 64 * 2**stage
        outputs = width * expansion
        for block in range(count):
            if expansion == 4:
                total += normed(inputs, width, 1) + normed(width, width, 3)
                total += normed(width, outputs, 1)
            else:
                total += normed(inputs, width, 3) + normed(width, width, 3)
            if block == 0 and inputs != outputs:
                total += normed(inputs, outputs, 1)
            inputs = outputs
    return total + full(inputs, 1000)


def cifar_residual(n: int) -> int:
    """Parameters of a CIFAR ResNet with 6 n + 2 layers and parameterless shortcuts."""
    stages = (
        normed(3, 16, 3) + 2 * n * normed(16, 16, 3),
        normed(16, 32, 3) + (2 * n - 1) * normed(32, 32, 3),
        normed(32, 64, 3) + (2 * n - 1) * normed(64, 64, 3),
    )
    return sum(stages) + full(64, 10)


def on_meta(name: str) -> nn.Module:
    with torch.device("meta"):
        return find(name).build(None)


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "exact", "closed_form"),
    [
        ("lenet5", 61_706, biased(1, 6, 5) + biased(6, 16, 5) + 48_120 + 10_164 + full(84, 10)),
        ("alexnet", 60_965_224, sum(ALEXNET_LAYERS)),
        ("vgg16", 138_357_544, sum(VGG16_LAYERS)),
        ("googlenet", 6_998_552, sum(GOOGLENET_LAYERS)),
        ("inception-v3", 23_834_568, sum(INCEPTION_LAYERS)),
        ("resnet18", 11_689_512, residual((2, 2, 2, 2), expansion=1)),
        ("resnet50", 25_557_032, residual((3, 4, 6, 3), expansion=4)),
        ("resnet101", 44_549_160, residual((3, 4, 23, 3), expansion=4)),
        ("resnet152", 60_192_808, residual((3, 8, 36, 3), expansion=4)),
        ("resnet110", 1_727_962, cifar_residual(18)),
        ("mlp", 1_079_810, full(54, 512) + 4 * full(512, 512) + full(512, 2)),
    ],
)
def test_parameter_counts(name: str, exact: int, closed_form: int) -> None:
    assert count(on_meta(name)) == exact == closed_form


def test_lenet5_differs_from_the_original_60000_as_documented() -> None:
    # LeCun 1998, section II.B: S2 has 12 and S4 has 32 trainable parameters, C3 has 1,516 because
    # it has 60 connections between maps where ours has 96, and the output codes are fixed.
    ours = count(LeNet5())
    subsampling = 12 + 32
    missing_connections = (6 * 16 - 60) * 25
    assert ours + subsampling - missing_connections - full(84, 10) == 60_000


def test_alexnet_layers_are_those_of_table_4_in_le_et_al() -> None:
    # Layers 1 to 8, in millions, with the decimals that the paper prints.
    printed = ["0.03", "0.3", "0.9", "0.7", "0.4", "37.8", "16.8", "4"]
    layers = [m for m in on_meta("alexnet").modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    for layer, exact, figure in zip(layers, ALEXNET_LAYERS, printed, strict=True):
        decimals = len(figure.partition(".")[2])
        assert count(layer) == exact
        assert round(exact / 1e6, decimals) == float(figure)


def test_alexnet_parts_and_table_1_of_du_et_al() -> None:
    # Their 58.6 M fully-connected parameters are ours; their 3.7 M in the convolutions are those
    # of a network without groups.
    model = on_meta("alexnet")
    assert isinstance(model, AlexNet)
    without_groups = [(3, 96, 11), (96, 256, 5), (256, 384, 3), (384, 384, 3), (384, 256, 3)]
    assert round(count(model.classifier) / 1e6, 1) == 58.6
    assert round(count(model.features) / 1e6, 1) == 2.3
    assert round(sum(biased(*shape) for shape in without_groups) / 1e6, 1) == 3.7


def test_vgg16_has_the_published_138_million() -> None:
    # Simonyan and Zisserman 2014, Table 2, column D.
    assert round(count(on_meta("vgg16")) / 1e6) == 138


def test_googlenet_blocks_have_the_parameters_of_its_table_1() -> None:
    # In units of 1,024 weights, without biases. Some rows of that table fit their own widths only
    # roughly; the largest gap is 7.5 % (block 4c).
    printed = [159, 380, 364, 437, 463, 580, 840, 1072, 1388]
    model = on_meta("googlenet")
    blocks = [m for m in model.modules() if isinstance(m, InceptionBlock)]
    for block, figure in zip(blocks, printed, strict=True):
        weights = sum(p.numel() for p in block.parameters() if p.dim() == 4)
        assert weights / 1024 == pytest.approx(figure, rel=0.08)
    assert count(model) == pytest.approx(6.8e6, rel=0.03)


def test_inception_v3_keeps_below_the_published_25_million() -> None:
    assert 23e6 < count(on_meta("inception-v3")) < 25e6


@pytest.mark.parametrize(
    ("n", "millions"), [(3, "0.27"), (5, "0.46"), (7, "0.66"), (9, "0.85"), (18, "1.7")]
)
def test_cifar_resnets_have_the_parameters_of_table_6(n: int, millions: str) -> None:
    # He et al. 2015, Table 6: ResNet-20, -32, -44, -56 and -110.
    with torch.device("meta"):
        exact = count(CifarResNet(n))
    decimals = len(millions.partition(".")[2])
    assert exact == cifar_residual(n)
    assert round(exact / 1e6, decimals) == float(millions)
