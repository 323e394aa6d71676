"""The predicted memory of a step, beside what PyTorch's allocator counts."""

import pytest
import torch
from torch import nn

from paceline.core.workload import replica_nbytes
from paceline.exchange.step import SGD, Share, train_step
from paceline.models import describe
from paceline.models.inception import Branches, GoogLeNet
from paceline.models.networks import Bottleneck, CifarResNet, LeNet5, ResNet
from paceline.record.clock import HostClock
from paceline.record.recorder import Recorder
from paceline.studies.profile.memory_use import Tracked, make_momentum, track


def measured(model: nn.Module, shape: tuple[int, ...]) -> Tracked:
    inputs, targets = torch.randn(shape), torch.randint(10, shape[:1])
    optimizer = SGD().optimizer(model)
    make_momentum(model, optimizer)

    def step() -> None:
        source = iter((Share(inputs, targets, 1.0),))
        train_step(model, optimizer, source, Recorder(HostClock(), "", 0))

    return track(step, model, optimizer, (inputs, targets))


def wide() -> nn.Module:
    """Features before many parameters, as in AlexNet: gradients come while features are kept."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.LocalResponseNorm(5),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 16 * 16, 512),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
        nn.Linear(512, 10),
    )


def branched() -> nn.Module:
    """Branches whose gradients meet, and batch normalisation."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        Branches(nn.Conv2d(16, 8, 1), nn.Conv2d(16, 24, 3, padding=1), nn.AvgPool2d(3, 1, 1)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(48, 10),
    )


CASES = {
    "lenet5": (LeNet5, (16, 1, 32, 32)),
    "wide": (wide, (8, 3, 32, 32)),
    "branched": (branched, (8, 3, 32, 32)),
    "cifar": (lambda: CifarResNet(1), (8, 3, 32, 32)),
    "googlenet": (lambda: GoogLeNet(10), (4, 3, 96, 96)),
    "bottlenecks": (lambda: ResNet(Bottleneck, (1, 1, 1, 1), 10), (4, 3, 96, 96)),
    "parameters": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(768, 4096), nn.Linear(4096, 10)),
        (2, 3, 16, 16),
    ),
}


SLOW = ("googlenet", "bottlenecks")


@pytest.mark.parametrize(
    "case", [pytest.param(one, marks=pytest.mark.slow) if one in SLOW else one for one in CASES]
)
def test_the_peak_of_a_step_is_predicted_within_a_tenth(case: str) -> None:
    make, shape = CASES[case]
    torch.manual_seed(0)
    model = make().train()
    predicted = replica_nbytes(describe(model, torch.zeros(shape)))
    assert predicted == pytest.approx(measured(model, shape).peak_nbytes, rel=0.1)


def test_tracking_counts_what_a_step_holds() -> None:
    """A linear model on its own: all that there is can be counted by hand."""
    model = nn.Sequential(nn.Linear(1000, 500, bias=False))
    found = measured(model, (10, 1000))
    weights, batch = 4 * 1000 * 500, 4 * 10 * 1000
    # Weights, momentum and gradient; scores, their logarithms and gradients are a few KiB each.
    assert found.peak_nbytes == pytest.approx(3 * weights + batch, rel=0.02)
