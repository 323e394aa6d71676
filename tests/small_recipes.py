"""Define recipes that train in seconds and have all state that checkpoints must keep."""

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from paceline.training.recipes.recipe import Recipe

_RATE, _DROPOUT = 0.01, 0.2


class Rows(Dataset):
    """Rows of six random numbers as two inputs; the target is a number or a class."""

    def __init__(self, num_samples: int, seed: int, *, has_classes: bool) -> None:
        source = torch.Generator().manual_seed(seed)
        self._rows, self._has_classes = torch.randn(num_samples, 6, generator=source), has_classes

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        row = self._rows[index]
        inputs = {"left": row[:4], "right": row[4:]}
        target = (row[:3].sum() * row[5]).tanh()
        if self._has_classes:
            return inputs, (target > 0).long() + 2 * (row[0] > 0).long()
        return inputs, target


class Network(nn.Module):
    """A network with two inputs, two dropouts, and running statistics if `has_norm`."""

    def __init__(
        self, num_outputs: int, *, has_norm: bool, dropout: float, late_dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.body, self.norm = nn.Linear(6, 16), nn.BatchNorm1d(16) if has_norm else nn.Identity()
        self.dropout, self.late_dropout = nn.Dropout(dropout), nn.Dropout(late_dropout)
        self.hidden, self.head = nn.Linear(16, 12), nn.Linear(12, num_outputs)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the outputs of a batch."""
        features = self.dropout(self.norm(self.body(torch.cat((left, right), 1))).relu())
        return self.head(self.late_dropout(self.hidden(features).relu()))


def with_dropout() -> Recipe:
    """Return a regression recipe with dropout, running statistics, AdamW and a schedule."""
    return _regression(has_norm=True, dropout=_DROPOUT)


def plain() -> Recipe:
    """Return a regression recipe without dropout: `wheel` does not save workers' random state."""
    return _regression(has_norm=False, dropout=0.0)


def classes() -> Recipe:
    """Return a classification recipe with dropout and AdamW, for `subbatch` and `hogbatch`.

    `subbatch` splits the layers around the second dropout.
    """
    return Recipe(
        model=lambda: Network(4, has_norm=False, dropout=_DROPOUT, late_dropout=_DROPOUT),
        train=Rows(600, 0, has_classes=True),
        test=Rows(90, 1, has_classes=True),
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, _RATE),
    )


def _regression(*, has_norm: bool, dropout: float) -> Recipe:
    return Recipe(
        model=lambda: Network(1, has_norm=has_norm, dropout=dropout),
        train=Rows(600, 0, has_classes=False),
        test=Rows(90, 1, has_classes=False),
        loss=_squares,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, _RATE),
        schedule=lambda optimizer, steps: torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 2 * _RATE, total_steps=steps, cycle_momentum=False
        ),
    )


def _squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs[:, 0] - targets).square().mean()
