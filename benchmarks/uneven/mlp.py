"""An MLP on the digits, in the loop that a user writes; epochs of all variants take turns."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from figures import spread
from paceline import DataParallel
from paceline.links.group import Group
from paceline.training.data import BalancedSampler, Dataset, ShardedBatches, load, loader
from paceline.training.models.networks import MLP
from paceline.training.models.paced import Stretched
from ranks import DEADLINE_S, Variant, alternate, compare, timed

RATIO = 4.0
BASELINE = "DDP, equal batches"
_BATCH_SIZE, _NUM_BLOCKS, _NUM_EPOCHS = 480, 12, 4
_SETTLING_EPOCHS = 16  # in which shares are found, and buckets and caches made


class Trainee:
    """A copy of the model in training on this rank; `epoch` is one pass over its samples."""

    def __init__(
        self,
        wrap: Callable[[nn.Module], Callable[[Tensor], Tensor]],
        sampler: Callable[[Callable[[Tensor], Tensor]], Any],
        data: Dataset,
        slow: float,
    ) -> None:
        torch.manual_seed(0)
        self.model = MLP((64, 1024, 1024, 10))
        self.stretched = Stretched(self.model, slow)
        self.parallel = wrap(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.batches: DataLoader[Any] = loader(data.train, sampler(self.parallel))

    def epoch(self) -> None:
        """Take all steps of an epoch."""
        for inputs, targets in self.batches:
            cross_entropy(self.parallel(inputs), targets).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


def measure(group: Group, quick: bool) -> dict[str, Any]:
    """Return the figures of all variants."""
    data = load("digits", (64,), 0)
    size = len(data.train)
    slow = RATIO if group.rank == 1 else 1.0
    place = (group.rank, group.world_size)

    def equal(_: object) -> ShardedBatches:
        return ShardedBatches(size, _BATCH_SIZE, *place, seed=0)

    def balanced(exchange: Any) -> Trainee:
        def wrap(model: nn.Module) -> DataParallel:
            return DataParallel(
                model, exchange=exchange, chunk=1, deadline_s=DEADLINE_S, balance="auto"
            )

        def sampler(parallel: Any) -> BalancedSampler:
            followed: BalancedSampler = parallel.balance(
                BalancedSampler(size, _BATCH_SIZE, *place, seed=0)
            )
            return followed

        return Trainee(wrap, sampler, data, slow)

    trainees = {
        BASELINE: Trainee(DistributedDataParallel, equal, data, slow),
        "allreduce, balanced": balanced("allreduce"),
        "host, balanced": balanced("host"),
    }
    alone = Trainee(
        lambda model: model, lambda _: ShardedBatches(size, _BATCH_SIZE, 0, 1, seed=0), data, 1.0
    )
    for trainee in trainees.values():
        for _ in range(8 if quick else _SETTLING_EPOCHS):
            trainee.epoch()
    variants = [
        Variant("the fast worker alone", timed(alone.epoch), 1),
        *(Variant(name, timed(one.epoch), group.world_size) for name, one in trainees.items()),
    ]
    num_blocks, num_epochs = (2, 1) if quick else (_NUM_BLOCKS, _NUM_EPOCHS)
    blocks = alternate(variants, group, num_blocks, num_epochs)
    shares = {name: list(_shares(one)) for name, one in trainees.items()}
    for one in (*trainees.values(), alone):
        one.stretched.remove()
        if isinstance(one.parallel, DataParallel):
            one.parallel.close()
    if group.rank:
        return {}
    return {"samples": size, "shares": shares, "variants": _rows(blocks, size)}


def _shares(trainee: Trainee) -> Iterator[int]:
    if isinstance(trainee.parallel, DataParallel):
        yield from trainee.parallel.statistics().shares or ()


def _rows(blocks: dict[str, list[list[float]]], size: int) -> dict[str, Any]:
    """Return samples a second, and how many times the baseline's: overall, and by blocks."""
    return {
        name: {
            "samples_per_s": spread(
                [size / seconds for block in blocks[name] for seconds in block]
            ),
            "times": 1 / row["ratio_of_medians"],
        }
        for name, row in compare(blocks, BASELINE).items()
    }
