"""The built-in networks run: shapes inside and outside, gradients, initial weights."""

import pytest
import torch
from torch import Tensor, nn

from paceline.core.errors import InvalidInput
from paceline.models.factory import find, names
from paceline.models.inception import GoogLeNet, InceptionBlock, InceptionV3
from paceline.models.networks import MLP, VGG16, AlexNet, PaddedShortcut, he_normal_


def run_on_meta(model: nn.Module, *shape: int) -> tuple[int, ...]:
    output: Tensor = model(torch.empty(2, *shape, device="meta"))
    return tuple(output.shape[1:])


@pytest.mark.parametrize("name", names())
def test_every_network_maps_its_input_shape_to_its_classes(name: str) -> None:
    architecture = find(name)
    assert architecture.input_shape is not None
    with torch.device("meta"):
        usual, few = architecture.build(None), architecture.build(7)
        samples = torch.zeros(2, *architecture.input_shape, dtype=architecture.input_dtype)
    # A language model has scores for each token.
    shape = samples.shape if architecture.input_dtype == torch.int64 else (2,)
    assert usual(samples).shape == (*shape, architecture.num_classes)
    assert few(samples).shape == (*shape, 7)


def test_alexnet_and_vgg_features_have_the_published_sizes() -> None:
    with torch.device("meta"):
        alexnet, vgg = AlexNet(), VGG16()
    assert run_on_meta(alexnet.features, 3, 227, 227) == (256, 6, 6)
    assert run_on_meta(vgg.features, 3, 224, 224) == (512, 7, 7)


def test_googlenet_grids_have_the_sizes_of_its_table_1() -> None:
    with torch.device("meta"):
        model = GoogLeNet()
        x = model.pool2(model.conv2(model.pool1(model.conv1(torch.empty(2, 3, 224, 224)))))
        sizes = [tuple(x.shape[1:])]
        for block in model.inceptions:
            x = block(x)
            if isinstance(block, InceptionBlock):
                sizes.append(tuple(x.shape[1:]))
    channels = [(192, 28), (256, 28), (480, 28), (512, 14), (512, 14), (512, 14), (528, 14)]
    channels += [(832, 14), (832, 7), (1024, 7)]
    assert sizes == [(width, side, side) for width, side in channels]


def test_inception_v3_grids_have_the_sizes_of_its_table_1() -> None:
    with torch.device("meta"):
        model = InceptionV3()
        at35 = model.grid35(model.stem(torch.empty(2, 3, 299, 299)))
        at17 = model.grid17(at35)
        at8 = model.grid8[0](at17)
    assert at35.shape[1:] == (288, 35, 35)
    assert at17.shape[1:] == (768, 17, 17)
    assert at8.shape[1:] == (1280, 8, 8)
    assert run_on_meta(model.grid8[1:], 1280, 8, 8) == (2048, 8, 8)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("lenet5", (1, 32, 32)),
        ("mlp-12-8-5", (3, 4)),
        ("resnet110", (3, 32, 32)),
        ("resnet18", (3, 64, 64)),
        ("googlenet", (3, 224, 224)),
        ("vit", (3, 32, 32)),
    ],
)
def test_small_networks_really_train(name: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = find(name).build(5)
    scores = model(torch.randn(2, *shape))
    nn.functional.cross_entropy(scores, torch.tensor([0, 3])).backward()
    assert scores.shape == (2, 5)
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert bool(torch.isfinite(parameter.grad).all())
    assert all(bool(p.grad.any()) for p in model.parameters() if p.grad is not None and p.dim() > 1)


def test_padded_shortcut_takes_every_second_pixel_and_adds_zero_channels() -> None:
    x = torch.arange(2 * 3 * 4 * 4.0).reshape(2, 3, 4, 4) + 1
    y = PaddedShortcut(2)(x)
    assert y.shape == (2, 5, 2, 2)
    assert torch.equal(y[:, :3, 1, 0], x[:, :, 2, 0])
    assert not y[:, 3:].any()


def test_initial_weights_keep_the_scale_of_a_deep_network() -> None:
    # With PyTorch's own initial weights the mean square would be 6 ** -16.
    torch.manual_seed(0)
    layers = [m for _ in range(16) for m in (nn.Linear(256, 256), nn.ReLU())]
    deep = nn.Sequential(*layers)
    he_normal_(deep)
    with torch.no_grad():
        scale = float(deep(torch.randn(64, 256)).pow(2).mean())
    assert 0.1 < scale < 10


def test_mlp_flattens_its_samples_and_ends_without_rectifier() -> None:
    torch.manual_seed(0)
    model = MLP((6, 32, 3))
    scores = model(torch.randn(64, 2, 3)).detach()
    assert scores.shape == (64, 3)
    assert float(scores.min()) < 0 < float(scores.max())


@pytest.mark.parametrize("widths", [(), (5,), (5, 0, 2)])
def test_mlp_refuses_impossible_widths(widths: tuple[int, ...]) -> None:
    with pytest.raises(InvalidInput, match="at least two widths"):
        MLP(widths)
