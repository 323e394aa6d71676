"""Built-in networks: sizes, initial weights, gradients; and models by a user's factory."""

import pytest
import torch
from torch import nn

from paceline.core.errors import InvalidInput
from paceline.training.models import find
from paceline.training.models.factory import names
from paceline.training.models.networks import SigmoidMLP, he_normal_
from refusals import refused


def on_meta(name: str) -> nn.Module:
    with torch.device("meta"):
        return find(name).build(None)


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "published"),
    [
        # LeCun 1998 has 60,000; its C3 connects 60 pairs of maps and not 96, its S2 and S4 train.
        ("lenet5", 60_000 - (12 + 32) + (96 - 60) * 25 + 850),
        ("alexnet", 60_965_224),  # bvlc_alexnet's
        *(("vgg16", 138_357_544), ("googlenet", 6_998_552), ("inception-v3", 23_834_568)),
        *(("resnet18", 11_689_512), ("resnet50", 25_557_032)),  # torchvision's
        ("mlp", (54 + 1) * 512 + 4 * (512 + 1) * 512 + (512 + 1) * 2),
        *(("gpt2", 124_439_808), ("gpt2-untied", 124_439_808 + 50_257 * 768)),
        *(("gpt", 3_290_624), ("gpt-untied", 3_290_624 + 256 * 256)),
        *(("gpt-1m", 1_057_152), ("gpt-1m-untied", 1_057_152 + 256 * 128)),
        *(("gpt-10m", 10_844_160), ("gpt-10m-untied", 10_844_160 + 256 * 384)),
        *(("gpt-30m", 30_033_920), ("gpt-30m-untied", 30_033_920 + 256 * 640)),
        *(("vit-b-16", 86_567_656), ("vit", 821_642)),  # torchvision's vit_b_16
    ],
)
def test_networks_have_the_published_numbers_of_parameters(name: str, published: int) -> None:
    assert count(on_meta(name)) == published


QUICK = ("alexnet", "covtype-mlp", "gpt", "lenet5", "mlp", "resnet18", "vgg16", "vit")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in names()]
)
def test_every_network_maps_its_input_shape_to_its_classes(name: str) -> None:
    architecture = find(name)
    with torch.device("meta"):
        samples = torch.zeros(2, *architecture.input_shape, dtype=architecture.input_dtype)
        # A language model has scores for each token.
        shape = samples.shape if architecture.input_dtype == torch.int64 else (2,)
        for asked, classes in ((None, architecture.num_classes), (7, 7)):
            assert architecture.build(asked)(samples).shape == (*shape, classes)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *(("lenet5", (1, 32, 32)), ("mlp-12-8-5", (3, 4))),
        *(("resnet18", (3, 64, 64)), ("vit", (3, 32, 32))),
        pytest.param("googlenet", (3, 224, 224), marks=pytest.mark.slow),
    ],
)
def test_gradients_reach_every_parameter(name: str, size: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = find(name).build(5)
    nn.functional.cross_entropy(model(torch.randn(2, *size)), torch.tensor([0, 3])).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert bool(torch.isfinite(parameter.grad).all())
        assert parameter.dim() == 1 or bool(parameter.grad.any())


def test_initial_weights_keep_the_scale_of_a_deep_network() -> None:
    # With PyTorch's own initial weights the mean square would be 6 ** -16.
    torch.manual_seed(0)
    deep = nn.Sequential(*(m for _ in range(16) for m in (nn.Linear(256, 256), nn.ReLU())))
    he_normal_(deep)
    assert 0.1 < deep(torch.randn(64, 256)).pow(2).mean().item() < 10


# The networks of the Hogbatch paper.


def test_a_sigmoid_mlp_is_a_chain_of_sigmoids_that_ends_in_scores() -> None:
    model, inputs = SigmoidMLP((3, 5, 4, 2)), torch.randn(7, 3)
    one, two, three = model.parameters()
    expected = torch.sigmoid(torch.sigmoid(inputs @ one.t()) @ two.t()) @ three.t()
    torch.testing.assert_close(model(inputs), expected)


def test_signals_reach_the_last_layer_of_sigmoids_and_gradients_the_first() -> None:
    # With PyTorch's own initial weights both vanish: scores differ between samples by 1e-6.
    torch.manual_seed(0)
    model = find("covtype-mlp").build(None)
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            assert layer.weight.std().item() == pytest.approx(6 / layer.in_features**0.5, rel=0.15)
            assert layer.weight.sum(1).abs().max() < 1e-4
    choices = [nn.functional.one_hot(torch.randint(count, (256,)), count) for count in (4, 40)]
    inputs = torch.cat([torch.rand(256, 10), *choices], 1)  # like features of covtype
    targets = (inputs[:, 0] > 0.5).long()
    scores = model(inputs)
    assert scores.std(0).min() > 0.1
    nn.functional.cross_entropy(scores, targets).backward()
    norms = [parameter.grad.norm().item() for parameter in model.parameters()]
    assert max(norms) < 100 * min(norms)


OWN = """
import torch
from torch import nn

class Tiny(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 3))

def broken():
    raise RuntimeError("first line\\nsecond line")

def leaves():
    raise SystemExit(3)

class Family:
    small = staticmethod(lambda: Tiny())

tiny = lambda: Tiny()
frozen = lambda: Tiny().requires_grad_(False)
empty = lambda: nn.ReLU()
number = lambda: 7
needs = lambda width: Tiny()
WIDTH = 5
made = Tiny()
"""


@pytest.fixture
def folder(own_modules) -> None:
    own_modules(
        own_models=OWN,
        own_broken="import torch\nraise ValueError('no good')\n",
        own_missing="import a_package_that_nobody_has\n",
        own_script="import sys\nsys.exit(2)\n",
        own_syntax="def f(:\n",
        **{"own_package.__init__": "", "own_package.nets": OWN},
    )


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        *(("alexnte", "'alexnet'"), ("AlexNet", "'alexnet'"), ("covtyp-mlp", "'covtype-mlp'")),
        *((name, "lenet5") for name in ("transformer-xxl", "")),
        *((name, "") for name in ("mlp-5", "mlp-5-0-2", "mlp-5-x", "sigmoid-mlp-5")),
        # Malformed names of factories.
        *((name, "") for name in (":Tiny", "own_models:", "own_models:Tiny:x", "./own.py:Tiny")),
    ],
)
def test_unknown_names(name: str, nearest: str) -> None:
    with refused("model") as caught:
        find(name)
    assert nearest in str(caught.value)


@pytest.mark.parametrize(
    "name", ["own_models:tiny", "own_models:Family.small", "own_package.nets:Tiny"]
)
def test_a_users_factory_in_the_current_directory(folder, name: str) -> None:
    own = find(name)
    assert (own.input_shape, own.num_classes) == (None, None)
    for num_classes in (None, 10):  # the factory decides
        assert own.build(num_classes)(torch.zeros(2, 4)).shape == (2, 3)


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("own_model:Tiny", "'own_model'"),
        ("own_package.net:Tiny", "'own_package.net'"),
        ("nowhere.at.all:Tiny", "'nowhere'"),
        ("own_missing:Tiny", "a_package_that_nobody_has"),
        ("own_broken:Tiny", "ValueError: no good (at own_broken.py:2)"),
        ("own_script:Tiny", "SystemExit: 2"),
        ("own_syntax:Tiny", "SyntaxError: "),
        ("own_models:Family.large", "'Family.large'"),
        ("own_models:WIDTH", "int"),
        ("own_models:made", "Tiny"),
        # Factories that exist but return no trainable model.
        ("own_models:broken", "RuntimeError: first line (at own_models.py:"),
        ("own_models:needs", "TypeError: "),
        ("own_models:leaves", "SystemExit: 3"),
        ("own_models:number", "int"),
        ("own_models:frozen", "parameters"),
        ("own_models:empty", "parameters"),
    ],
)
def test_factories_that_make_no_model(folder, name: str, cause: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        find(name).build(None)
    assert caught.value.field in ("model", name)
    assert cause in str(caught.value)
    assert "None" not in str(caught.value)
