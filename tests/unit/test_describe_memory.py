"""Memory of steps found by `describe`, compared with PyTorch's allocations."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from nets import Net, residual
from paceline.core.workload import replica_nbytes
from paceline.studies.profile.memory_use import make_momentum, track
from paceline.training.models import describe
from paceline.training.models.inception import GoogLeNet
from paceline.training.models.networks import Bottleneck, LeNet5, ResNet
from paceline.training.models.transformers import GPT, ViT
from paceline.training.recipes.losses import next_token_loss

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported")
STEPS, SAMPLES, WORDS, CLASSES = 10, 64, 50, 10


def classifier(
    kind: type[nn.RNNBase], hidden: int = 32, **options: Any
) -> tuple[nn.Module, Tensor]:
    """Return an embedding, a recurrent layer and a classifier of its last step, and a batch."""

    def compute(net: nn.Module, words: Tensor) -> Tensor:
        outputs, _ = net.recurrent(net.embed(words))
        return net.head(outputs[:, -1] if net.recurrent.batch_first else outputs[-1])

    layer = kind(32, hidden, **options)
    head = nn.Linear(hidden * (1 + layer.bidirectional), CLASSES)
    shape = (SAMPLES, STEPS) if layer.batch_first else (STEPS, SAMPLES)
    model = Net(compute, embed=nn.Embedding(WORDS, 32), recurrent=layer, head=head)
    return model, torch.randint(WORDS, shape)


class Projected(nn.LSTM):
    """An LSTM with projections: PyTorch has no fused kernel for it on the CPU."""

    def __init__(self, inputs: int, hidden: int, **options: object) -> None:
        super().__init__(inputs, 2 * hidden, proj_size=hidden, **options)


def wide() -> nn.Module:
    """Large gradients arrive while features of the convolution are kept, as in AlexNet."""
    features = nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(inplace=True), nn.LocalResponseNorm(5)
    hidden = nn.Flatten(), nn.Linear(16 * 16 * 16, 512), nn.ReLU(inplace=True), nn.Dropout(0.5)
    return nn.Sequential(*features, nn.MaxPool2d(2), *hidden, nn.Linear(512, 10))


BOTH = {"num_layers": 2, "bidirectional": True, "batch_first": True}
SIZES = {"width": 64, "num_layers": 3, "num_heads": 4}
MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "lstm": lambda: classifier(nn.LSTM, batch_first=True),
    "lstm, both ways": lambda: classifier(nn.LSTM, **BOTH),
    "lstm, projected": lambda: classifier(Projected, hidden=16, batch_first=True),
    "gru": lambda: classifier(nn.GRU, batch_first=True),
    "tanh": lambda: classifier(nn.RNN),
    "gpt": lambda: (GPT(64, context=64, **SIZES), torch.randint(WORDS, (4, 64))),
    "vit": lambda: (ViT(CLASSES, image=(3, 32, 32), patch=4, **SIZES), torch.randn(4, 3, 32, 32)),
    "lenet5": lambda: (LeNet5(), torch.randn(16, 1, 32, 32)),
    "wide": lambda: (wide(), torch.randn(8, 3, 32, 32)),
    "residual": lambda: (residual(), torch.randn(8, 3, 32, 32)),
    "googlenet": lambda: (GoogLeNet(10), torch.randn(4, 3, 96, 96)),
    "bottlenecks": lambda: (ResNet(Bottleneck, (1,) * 4, 10), torch.randn(4, 3, 96, 96)),
}
SLOW = ("googlenet", "bottlenecks")
CASES = [pytest.param(one, marks=pytest.mark.slow if one in SLOW else ()) for one in MODELS]


def model_and_batch(case: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return MODELS[case]()


@pytest.mark.parametrize("case", CASES)
def test_kept_memory_equals_the_allocations_after_forward(case: str) -> None:
    """The scores are excluded: the caller holds them, and backward does not read them."""
    model, batch = model_and_batch(case)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        scores = model(batch)
    allocated = sum(row.self_cpu_memory_usage for row in found.key_averages()) - scores.nbytes
    kept = sum(layer.kept_nbytes or 0 for layer in describe(model, batch).layers)
    assert kept == pytest.approx(allocated, rel=0.01)


def peak_nbytes(model: nn.Module, batch: Tensor) -> int:
    targets = torch.randint(CLASSES, model(batch).shape[:-1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    make_momentum(model, optimizer)

    def step() -> None:
        next_token_loss(model(batch), targets).backward()
        optimizer.step()

    return track(step, model, optimizer, (batch, targets)).peak_nbytes


@pytest.mark.parametrize("case", CASES)
def test_the_peak_of_a_step_is_predicted(case: str) -> None:
    model, batch = model_and_batch(case)
    predicted = replica_nbytes(describe(model, batch))
    assert predicted == pytest.approx(peak_nbytes(model, batch), rel=0.1)
