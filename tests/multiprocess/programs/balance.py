"""Cases of unequal batches; see ranks.main for the output. Argument: EXCHANGES."""

import random
import sys
import time
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from paceline.data import BalancedSampler, Collate
from paceline.models.paced import Stretched
from ranks import Place, batch, bits, case, distance, main, quick

NUM_STEPS = 12


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def squared_error(model: nn.Module, samples: Tensor) -> Tensor:
    return (model(samples) - samples.sin().sum(1, keepdim=True)).square().mean()


def splits(size: int, batch_size: int = 24) -> list[list[int]]:
    """Two splits in which only one rank has samples, equal shares, and random ones."""
    numbers, found = random.Random(size), []
    for _ in range(NUM_STEPS - 2):
        ends = [0, *sorted(numbers.randint(0, batch_size) for _ in range(size - 1)), batch_size]
        found.append([b - a for a, b in pairwise(ends)])
    lone = [batch_size, *[0] * (size - 1)]
    return [lone, [batch_size // size] * size, *found, lone[::-1]]


def apart(module: nn.Module, oracle: nn.Module) -> float:
    """How far a gradient is from the oracle's, relative to its length."""
    own, other = (
        torch.cat([p.grad.flatten().double() for p in model.parameters()])
        for model in (module, oracle)
    )
    return float((own - other).norm() / other.norm())


def gradients(place: Place, dtype: torch.dtype, first: int = 0, **options):
    """Compare the gradients of each step, and the model at the end, with those of one process."""
    module, oracle = place.build(lambda: network().to(dtype))
    parallel = place.parallel(module, balance="auto", **options)
    optimizers = [
        torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (parallel, oracle)
    ]
    worst = 0.0
    for step, split in enumerate(splits(place.size)[first:]):
        whole = batch(0, step, sum(split), 6, dtype=dtype)
        # Of the same weights: what is compared is one gradient, not a training of rounding errors.
        oracle.load_state_dict(module.state_dict())
        for optimizer in optimizers:
            optimizer.zero_grad()
        squared_error(parallel, whole.split(split)[place.rank]).backward()
        squared_error(oracle, whole).backward()
        worst = max(worst, apart(module, oracle))
        for optimizer in optimizers:
            optimizer.step()
    return {"worst": worst, "bits": bits(parallel)}


@case
def gradients_float64(place: Place):
    return gradients(place, torch.float64)


@case
def gradients_float32(place: Place):
    return gradients(place, torch.float32)


@case
def gradients_of_an_exchange_of_its_own_choice(place: Place):
    return gradients(place, torch.float64, 1, exchange="auto", chunk="auto")


@case
def micro_batches(place: Place):
    """Each pass has a split of its own, and the step is that of one process with micro-batches."""
    module, oracle = place.build(lambda: network().double())
    parallel = place.parallel(module, balance="auto")
    parts = splits(place.size)
    for number in range(3):
        whole = batch(0, number, 24, 6)
        squared_error(oracle, whole).backward()
        own = whole.split(parts[number])[place.rank]
        if number < 2:
            with parallel.no_sync():
                squared_error(parallel, own).backward()
        else:
            squared_error(parallel, own).backward()
    return {"worst": apart(module, oracle), "bits": ""}


@case
def two_outputs_and_a_decay_in_the_loss(place: Place):
    """What no sample takes part in is not weighted; what is said of samples goes before rows."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(6, 3), nn.Linear(6, 2)

        def forward(self, columns: Tensor) -> dict[str, Tensor]:
            return {"one": self.one(columns.t()), "other": self.other(columns.t())}

    def loss(model: nn.Module, inner: Two, samples: Tensor) -> Tensor:
        outputs = model(samples.t())
        decay = sum(p.square().sum() for p in inner.parameters())
        return outputs["one"].square().mean() + outputs["other"].exp().mean() + 0.1 * decay

    module, oracle = place.build(lambda: Two().double())
    parallel = place.parallel(module, balance="auto")
    split = [7 * rank + 1 for rank in range(place.size)]
    whole = batch(0, 0, sum(split), 6)
    parallel.samples(split[place.rank])
    loss(parallel, module, whole.split(split)[place.rank]).backward()
    loss(oracle, oracle, whole).backward()
    return {"worst": apart(module, oracle), "bits": ""}


@case
def batch_norm_without_samples(place: Place):
    """Running statistics are not those of nothing, and are the same on all ranks."""
    module, _ = place.build(
        lambda: nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(108, 4)
        )
    )
    parallel = place.parallel(module, balance="auto")
    for step in range(4):
        split = [0] * place.size
        split[step % place.size] = 6
        images = torch.randn(6, 1, 8, 8).split(split)[place.rank]
        cross_entropy(parallel(images), torch.zeros(len(images), dtype=torch.int64)).backward()
    values = [*module.parameters(), *module.buffers(), *(p.grad for p in module.parameters())]
    return {"finite": all(value.isfinite().all().item() for value in values), "bits": bits(module)}


@case
def evaluation_on_one_rank_alone(place: Place):
    """With gradients that nobody asks for: no other rank must be waited for."""
    if place.exchange == "allreduce":  # DistributedDataParallel makes buckets in any forward
        return None
    module, oracle = place.build(lambda: network().double())
    parallel = place.parallel(module, balance="auto")
    for step in range(3):
        split = [step + 2 * rank for rank in range(place.size)]
        whole = batch(0, step, sum(split), 6)
        squared_error(parallel, whole.split(split)[place.rank]).backward()
        squared_error(oracle, whole).backward()
        if place.rank == 1:
            parallel.eval()(whole)
            parallel.train()
    return {"worst": apart(module, oracle), "bits": ""}


def digits_like(place: Place, slow: float, num_epochs: int, batch_size: int = 240):
    """Train with the last rank so many times slower; say what came of its batches."""
    module, oracle = place.build(
        lambda: nn.Sequential(nn.Linear(64, 600), nn.Tanh(), nn.Linear(600, 10)).double()
    )
    data = TensorDataset(batch(0, 0, 1210, 64), torch.arange(1210) % 10)
    stretched = Stretched(module, slow if place.rank == place.size - 1 else 1.0)
    parallel = place.parallel(module, balance="auto")
    sampler = parallel.balance(BalancedSampler(1210, batch_size, place.rank, place.size, seed=1))
    alone = BalancedSampler(1210, batch_size, 0, 1, seed=1)
    own = DataLoader(data, batch_sampler=sampler, collate_fn=Collate(data))
    all_of_them = DataLoader(data, batch_sampler=alone)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (parallel, oracle)]
    used: list[list[int]] = []
    for epoch in range(num_epochs):
        used.append([])
        for one in (sampler, alone):
            one.set_epoch(epoch)
        for (inputs, targets), (whole, all_targets) in zip(own, all_of_them, strict=True):
            for optimizer in optimizers:
                optimizer.zero_grad()
            cross_entropy(parallel(inputs), targets).backward()
            cross_entropy(oracle(whole), all_targets).backward()
            for optimizer in optimizers:
                optimizer.step()
            used[-1].append(len(inputs))
    stretched.remove()
    pairs = zip(module.parameters(), oracle.parameters(), strict=True)
    statistics = parallel.statistics()
    return {
        "worst": max(distance(a, b) for a, b in pairs),
        "bits": bits(module),
        "shares": statistics.shares,
        "faster": statistics.samples_per_s[0] / statistics.samples_per_s[-1],
        "used": used,
    }


@case
def shares_follow_a_slow_rank_in_the_middle_of_epochs(place: Place):
    return digits_like(place, slow=6.0, num_epochs=8)


@case
def a_rank_that_does_not_help_gets_no_samples(place: Place):
    return digits_like(place, slow=100.0, num_epochs=2, batch_size=110)


@case
def samplers_that_differ(place: Place):
    parallel = place.parallel(network(), balance="auto")
    parallel.balance(BalancedSampler(100, 10, place.rank, place.size, seed=place.rank))


@case
def a_sampler_of_other_ranks(place: Place):
    parallel = place.parallel(network(), balance="auto")
    parallel.balance(BalancedSampler(100, 10, 0, place.size + 1))


@case
def nothing_to_count(place: Place):
    place.parallel(nn.Linear(1, 1), balance="auto")(torch.tensor(1.0))


@quick
def a_lost_rank_is_named(place: Place):
    """The last rank stops; the others wait for its number of samples no longer than agreed."""
    module, _ = place.build(network)
    parallel = place.parallel(module, balance="auto")
    for step in range(2):  # after which torch has made its buckets
        squared_error(parallel, batch(place.rank, step, dtype=torch.float32)).backward()
    if place.rank == place.size - 1:
        time.sleep(2.5 * place.deadline_s)
        return
    squared_error(parallel, batch(place.rank, 2, dtype=torch.float32)).backward()


if __name__ == "__main__":
    main(sys.argv[1].split(","), sys.argv[2].split(",") if len(sys.argv) > 2 else ())
