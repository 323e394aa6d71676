"""A model with a head to split, and uneven batches of it, the same wherever they are asked for."""

import torch
from torch import Tensor, nn

FEATURES, CLASSES, MOST = 6, 5, 9


class Net(nn.Module):
    """Widths that 2, 3 and 4 workers do not divide."""

    def __init__(self, p: float = 0.5, norm: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 10), nn.Tanh())
        between = [nn.BatchNorm1d(11)] if norm else []
        self.head = nn.Sequential(
            *(nn.Linear(10, 11), *between, nn.ReLU(inplace=True), nn.Dropout(p)),
            *(nn.Linear(11, 7, bias=False), nn.Sigmoid(), nn.Dropout(p), nn.Linear(7, CLASSES)),
        )

    def forward(self, samples: Tensor) -> Tensor:
        return self.head(self.body(samples))


def sizes_of(size: int) -> list[int]:
    """Sizes of sub-batches, from one sample of each rank to all: they divide a step, or do not."""
    return sorted({size, size + 1, 5, 8, 10, size * MOST - 1, size * MOST})


def count_of(rank: int, step: int) -> int:
    """Batches are uneven, and now and then smaller than there are workers."""
    return 1 + (5 * rank + 3 * step) % MOST


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(1 + 1000 * rank + step)
    count = count_of(rank, step)
    inputs = torch.randn(count, FEATURES, generator=source)
    return inputs, torch.randint(CLASSES, (count,), generator=source)


def whole(size: int, step: int) -> tuple[Tensor, Tensor]:
    inputs, targets = zip(*(batch(rank, step) for rank in range(size)), strict=True)
    return torch.cat(inputs), torch.cat(targets)


def places(size: int, step: int, num_passes: int) -> list[list[int]]:
    """The samples of each sub-batch, as the docstring of the strategy's plan has them."""
    counts = [count_of(rank, step) for rank in range(size)]
    passes: list[list[int]] = [[] for _ in range(num_passes)]
    first = 0
    for count in counts:
        whole_part, rest = divmod(count, len(passes))
        for number, rows in enumerate(passes):
            part = whole_part + (number < rest)
            rows.extend(range(first, first + part))
            first += part
    return [rows for rows in passes if rows]
