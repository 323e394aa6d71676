"""Valid and invalid recipes as users write them; their names are own_recipes:NAME."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

from paceline import Recipe

VOCABULARY, CONTEXT, WIDTH = 29, 12, 8


class TokenModel(nn.Module):
    """A language model: logits (N, T, V) of int64 tokens (N, T)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens).tanh())


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def token_data(size: int) -> TensorDataset:
    rows = (torch.arange(CONTEXT + 1) + torch.arange(size)[:, None]) % VOCABULARY
    return TensorDataset(rows[:, :-1], rows[:, 1:])


def tokens(**others: Any) -> Recipe:
    """Return a recipe of a language model with AdamW, with fields replaced by `others`."""
    common: dict[str, Any] = {
        "model": TokenModel,
        "train": token_data(64),
        "test": token_data(16),
        "loss": next_token_loss,
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    }
    return Recipe(**common | others)


class Fields(nn.Module):
    """A model with named inputs and outputs; its forward also has the label as an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.scale = nn.Linear(1, WIDTH)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, ids: Tensor, weight: Tensor, label: Tensor) -> dict[str, Tensor]:
        inner = self.embedding(ids).mean(1) * self.scale(weight[:, None])
        return {"logits": self.head(inner), "inner": inner}


class FieldData:
    """A data set of 64 samples, each a mapping of fields."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = (torch.arange(5) * index) % VOCABULARY
        return {"ids": ids, "weight": torch.tensor(index / 64), "label": index % 2}


def field_loss(outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    regular = outputs["inner"].square().mean()
    return F.cross_entropy(outputs["logits"], batch["label"]) + 0.01 * regular


def fields() -> Recipe:
    """Return a recipe with mappings as batches, and without test data, score and optimizer."""
    return Recipe(model=Fields, train=FieldData(), loss=field_loss)


def tested_fields() -> Recipe:
    return replace(fields(), test=FieldData())


ready = tokens(name="the ready one")


# --- invalid recipes


def wrong(**others: Any) -> Callable[[], Recipe]:
    return lambda: tokens(**others)


class Broken:
    """The token data with one invalid sample."""

    def __init__(self, instead: Callable[[], Any], at: int = 40) -> None:
        self._instead, self._at, self._data = instead, at, token_data(64)

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        return self._instead() if index == self._at else self._data[index]


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter([torch.zeros(3)])

    def __len__(self) -> int:
        return 1


class Untrained(nn.Module):
    def forward(self, tokens: Tensor) -> Tensor:
        return F.one_hot(tokens, VOCABULARY).float()


def failing(error: BaseException) -> Callable[[], Any]:
    def fail() -> Any:
        raise error

    return fail


def loss_of_each(logits: Tensor, targets: Tensor) -> Tensor:
    """Return a scalar for a single sample, and a vector for several."""
    each = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none").mean(1)
    return each[0] if len(each) == 1 else each


def misspelled(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, weight_decy=0.1)  # type: ignore[call-arg] # a typo


def number() -> int:
    return 7


raises = failing(ValueError("there is no third file"))
empty = wrong(train=token_data(0))
stream = wrong(train=Stream())
leaves = wrong(train=Broken(failing(SystemExit("no more"))))
uneven = wrong(train=Broken(lambda: (torch.zeros(3, dtype=torch.int64),) * 2))
unreadable = wrong(train=Broken(failing(OSError("the disk is gone"))))
triple = wrong(train=TensorDataset(*token_data(64).tensors, token_data(64).tensors[0]))
vector_of_several = wrong(loss=loss_of_each)
vector_loss = wrong(loss=lambda logits, targets: logits.mean((1, 2)))
unfit_loss = wrong(loss=F.cross_entropy)
detached_loss = wrong(loss=lambda logits, targets: next_token_loss(logits, targets).detach())
vector_score = wrong(score=lambda logits, targets: logits.argmax(-1) == targets)
wrong_field = wrong(optimizer=misspelled)
no_optimizer = wrong(optimizer=lambda parameters: 3)
no_schedule = wrong(schedule=lambda optimizer, num_steps: 3)
untrained = wrong(model=Untrained)
unmade = wrong(model=failing(RuntimeError("no such weights")))
no_model = wrong(model=lambda: 3)
