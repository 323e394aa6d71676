"""Define networks for hub and workers, with a fixed number of classes."""

from torch import nn

from paceline.training.models.networks import AlexNet


def alexnet() -> nn.Module:
    """Return AlexNet with 1,000 classes, even if the data has fewer."""
    return AlexNet()


def digits() -> nn.Module:
    """Return a small CNN for 1x8x8 digits: two convolutions, then two linear layers."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )
