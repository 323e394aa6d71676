"""User recipes for strategy hogbatch: tokens, no test data, and an unreadable sample."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import Dataset, TensorDataset

from paceline.training.recipes.recipe import Recipe


class Text(Dataset):
    """Sequences of tokens that count up modulo 13."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = (torch.arange(9) + index) % 13
        return {"ids": ids[:-1], "mask": torch.ones(8), "labels": ids[1:]}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.dropout = nn.Embedding(13, 16), nn.Dropout(0.1)
        self.head = nn.Linear(16, 13)

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        return self.head(self.dropout(self.embedding(ids)) * mask[..., None])


def next_token(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten())


def right_tokens(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return (outputs.argmax(-1) == batch["labels"]).double().mean()


def text() -> Recipe:
    return Recipe(model=Net, train=Text(300), test=Text(40), loss=next_token, score=right_tokens)


def without_tests() -> Recipe:
    data = TensorDataset(torch.randn(200, 3), torch.randn(200, 2))
    return Recipe(model=lambda: nn.Linear(3, 2), train=data, loss=mse_loss)


class Broken(Dataset):
    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == 150:
            raise OSError("disk on fire")
        return torch.zeros(3), 1


def raising() -> Recipe:
    return Recipe(model=lambda: nn.Linear(3, 2), train=Broken(), loss=cross_entropy)
