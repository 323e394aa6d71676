"""Small recipes for tests of the command line, with all kinds of state in a checkpoint."""

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from paceline.training.recipes.recipe import Recipe


class Sums(Dataset):
    """Samples of two inputs, and a target that depends on both."""

    def __init__(self, num_samples: int, seed: int) -> None:
        source = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(num_samples, 6, generator=source)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        row = self.inputs[index]
        return {"left": row[:4], "right": row[4:]}, (row[:3].sum() * row[5]).tanh()


class Network(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 16), nn.Linear(2, 16)
        self.norm = nn.BatchNorm1d(16) if dropout else nn.Identity()
        self.dropout, self.last = nn.Dropout(dropout), nn.Linear(16, 1)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        mixed = self.norm(self.left(left) * self.right(right))
        return self.last(self.dropout(mixed.relu()))[:, 0]


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


def _recipe(dropout: float) -> Recipe:
    return Recipe(
        model=lambda: Network(dropout),
        train=Sums(600, 0),
        test=Sums(90, 1),
        loss=squares,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, 0.01),
        schedule=lambda optimizer, steps: torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.02, total_steps=steps, cycle_momentum=False
        ),
    )


def with_dropout() -> Recipe:
    """Return a recipe with dropout, running statistics, AdamW and a schedule."""
    return _recipe(0.2)


class Signs(Sums):
    """The inputs of `Sums` with four classes as targets."""

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        inputs, target = super().__getitem__(index)
        return inputs, ((target > 0).long() + 2 * (inputs["left"][0] > 0).long())


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.dropout = nn.Linear(6, 16), nn.Dropout(0.2)
        self.hidden, self.head = nn.Linear(16, 12), nn.Linear(12, 4)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        features = self.dropout(self.body(torch.cat((left, right), 1)).relu())
        return self.head(self.hidden(features).relu())


def classes() -> Recipe:
    """Return a classification recipe with dropout."""
    return Recipe(
        model=Classifier,
        train=Signs(600, 0),
        test=Signs(90, 1),
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, 0.01),
    )


def plain() -> Recipe:
    """Return a recipe that draws no random numbers during training."""
    return _recipe(0.0)
