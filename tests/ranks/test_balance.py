"""Unequal batches on real ranks, compared with one process on the whole batch."""

import random
import time
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from codec_cases import normal
from codec_training import Place, bits, same
from paceline import DataParallel
from paceline.training.data import BalancedSampler, Collate
from paceline.training.models.paced import Stretched
from pair import Ranks
from refusals import refused

slow = pytest.mark.slow
NUM_STEPS = 12


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return normal(torch.Size(shape).numel(), 1 + step).to(dtype).view(shape)


def squared_error(model: nn.Module, samples: Tensor) -> Tensor:
    return (model(samples) - samples.sin().sum(1, keepdim=True)).square().mean()


def splits(size: int, batch_size: int = 24) -> list[list[int]]:
    """Return splits with all samples on one rank, with equal shares, and random ones."""
    numbers, found = random.Random(size), []
    for _ in range(NUM_STEPS - 2):
        ends = [0, *sorted(numbers.randint(0, batch_size) for _ in range(size - 1)), batch_size]
        found.append([b - a for a, b in pairwise(ends)])
    lone = [batch_size, *[0] * (size - 1)]
    return [lone, [batch_size // size] * size, *found, lone[::-1]]


def apart(module: nn.Module, oracle: nn.Module) -> float:
    """Return the distance of all gradients from the oracle's, relative to the oracle's norm."""
    own, other = (
        torch.cat([p.grad.flatten().double() for p in model.parameters()])
        for model in (module, oracle)
    )
    return float((own - other).norm() / other.norm())


def gradients(exchange: str, is_float64: bool, first: int = 0, **options: Any) -> str:
    """Compare the gradients of each step, and the final model, with one process."""
    place, dtype = Place.here(exchange=exchange), torch.float64 if is_float64 else torch.float32
    module, oracle = place.build(lambda: network().to(dtype))
    parallel = place.parallel(module, balance="auto", **options)
    optimizers = [
        torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (parallel, oracle)
    ]
    for step, split in enumerate(splits(place.size)[first:]):
        whole = batch(step, sum(split), 6, dtype=dtype)
        # Start each step from equal weights, so that rounding errors do not accumulate.
        oracle.load_state_dict(module.state_dict())
        for optimizer in optimizers:
            optimizer.zero_grad()
        squared_error(parallel, whole.split(split)[place.rank]).backward()
        squared_error(oracle, whole).backward()
        assert apart(module, oracle) <= (1e-12 if is_float64 else 1e-6)
        for optimizer in optimizers:
            optimizer.step()
    return bits(parallel.parameters())


def chosen_exchange() -> str:
    return gradients("auto", True, 1, chunk="auto")


def micro_batches(exchange: str) -> None:
    """Split each micro-batch differently; the step equals one process with micro-batches."""
    place = Place.here(exchange=exchange)
    module, oracle = place.build(lambda: network().double())
    parallel = place.parallel(module, balance="auto")
    parts = splits(place.size)
    for number in range(3):
        whole = batch(number, 24, 6)
        squared_error(oracle, whole).backward()
        own = whole.split(parts[number])[place.rank]
        if number < 2:
            with parallel.no_sync():
                squared_error(parallel, own).backward()
        else:
            squared_error(parallel, own).backward()
    assert apart(module, oracle) <= 1e-12


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 3), nn.Linear(6, 2)

    def forward(self, columns: Tensor) -> dict[str, Tensor]:
        return {"one": self.one(columns.t()), "other": self.other(columns.t())}


def two_outputs(exchange: str) -> None:
    """Decay is not weighted by a rank's share; `samples()` overrides the number of rows."""

    def loss(model: nn.Module, inner: nn.Module, samples: Tensor) -> Tensor:
        outputs = model(samples.t())
        decay = sum(p.square().sum() for p in inner.parameters())
        return outputs["one"].square().mean() + outputs["other"].exp().mean() + 0.1 * decay

    place = Place.here(exchange=exchange)
    module, oracle = place.build(lambda: Two().double())
    parallel = place.parallel(module, balance="auto")
    split = [7 * rank + 1 for rank in range(place.size)]
    whole = batch(0, sum(split), 6)
    parallel.samples(split[place.rank])
    loss(parallel, module, whole.split(split)[place.rank]).backward()
    loss(oracle, oracle, whole).backward()
    assert apart(module, oracle) <= 1e-12


def batch_norm(exchange: str) -> str:
    """Train with samples on one rank per step; statistics and parameters stay finite."""
    place = Place.here(exchange=exchange)
    layers = nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(108, 4)
    module, _ = place.build(lambda: nn.Sequential(*layers))
    parallel = place.parallel(module, balance="auto")
    for step in range(4):
        split = [0] * place.size
        split[step % place.size] = 6
        images = torch.randn(6, 1, 8, 8).split(split)[place.rank]
        cross_entropy(parallel(images), torch.zeros(len(images), dtype=torch.int64)).backward()
    values = [*module.parameters(), *module.buffers(), *(p.grad for p in module.parameters())]
    assert all(value.isfinite().all().item() for value in values)
    return bits(module.parameters())


def evaluation_on_rank_1_alone() -> None:
    """Evaluate on rank 1 with gradients enabled but without backward; it must not wait."""
    place = Place.here(exchange="host")  # with allreduce, DDP may build its buckets in any forward
    module, oracle = place.build(lambda: network().double())
    parallel = place.parallel(module, balance="auto")
    for step in range(3):
        split = [step + 2 * rank for rank in range(place.size)]
        whole = batch(step, sum(split), 6)
        squared_error(parallel, whole.split(split)[place.rank]).backward()
        squared_error(oracle, whole).backward()
        if place.rank == 1:
            parallel.eval()(whole)
            parallel.train()
    assert apart(module, oracle) <= 1e-12


@pytest.mark.parametrize("place", ["pair", pytest.param("triple", marks=slow)])
@pytest.mark.parametrize("exchange", ["allreduce", pytest.param("host", marks=slow)])
def test_gradients_match_one_process(ranks: Ranks, exchange: str):
    for is_float64 in (True, False):
        same(ranks(gradients, exchange, is_float64))
    ranks(micro_batches, exchange)
    ranks(two_outputs, exchange)
    same(ranks(batch_norm, exchange))


def test_exchanges_may_be_chosen_and_one_rank_may_evaluate_alone(pair: Ranks):
    same(pair(chosen_exchange))
    pair(evaluation_on_rank_1_alone)


def beside_a_slow_rank(slow: float, num_epochs: int, batch_size: int) -> dict[str, Any]:
    """Train with the last rank slowed down; return the shares and batch sizes used."""
    place = Place.here()
    module = nn.Sequential(nn.Linear(64, 600), nn.Tanh(), nn.Linear(600, 10))
    data = TensorDataset(batch(0, 1210, 64, dtype=torch.float32), torch.arange(1210) % 10)
    stretched = Stretched(module, slow if place.rank == place.size - 1 else 1.0)
    parallel = place.parallel(module, balance="auto")
    sampler = parallel.balance(BalancedSampler(1210, batch_size, place.rank, place.size, seed=1))
    used: list[list[int]] = []
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        used.append([])
        for inputs, targets in DataLoader(data, batch_sampler=sampler, collate_fn=Collate(data)):
            cross_entropy(parallel(inputs), targets).backward()
            used[-1].append(len(inputs))
    stretched.remove()
    return {"shares": list(parallel.statistics().shares), "used": used}


@slow
def test_shares_follow_a_slow_rank(pair: Ranks):
    """One rank is six times slower; other processes may slow down either rank."""
    outcomes = pair(beside_a_slow_rank, 6.0, 8, 240)
    assert sum(same([one["shares"] for one in outcomes])) == 240
    # Sum over all epochs: in a single one, the fast rank may have been without a core.
    first, last = [sum(map(sum, one["used"])) for one in outcomes]
    assert first > last
    used = outcomes[-1]["used"]
    assert len({number for epoch in used for number in epoch}) > 2  # it changed during training
    for epoch in zip(*(one["used"] for one in outcomes), strict=True):
        assert sum(map(sum, epoch)) == 1210


@slow
def test_a_rank_that_does_not_help_gets_no_samples(triple: Ranks):
    last = triple(beside_a_slow_rank, 100.0, 2, 110)[-1]
    assert (last["shares"][-1], set(last["used"][-1])) == (0, {0})


def wrong_samplers() -> None:
    place = Place.here()
    for sampler in (
        BalancedSampler(100, 10, place.rank, place.size, seed=place.rank),
        BalancedSampler(100, 10, 0, place.size + 1),
    ):
        parallel = place.parallel(network(), balance="auto")
        with refused("sampler"):
            parallel.balance(sampler)
    parallel = place.parallel(nn.Linear(1, 1), balance="auto")
    with refused("balance"):
        parallel(torch.tensor(1.0))  # without rows


def test_samplers_that_differ_and_inputs_without_rows_are_refused(pair: Ranks):
    pair(wrong_samplers)


def rank_1_stays_away() -> None:
    """Skip the third step on rank 1; the other ranks wait for its sample count."""
    place = Place.here(deadline_s=2.0)
    module, _ = place.build(network)
    parallel = place.parallel(module, balance="auto")
    for step in range(2):  # DDP builds its buckets in these steps
        squared_error(parallel, batch(step, 4, 6, dtype=torch.float32)).backward()
    if place.rank == 1:
        time.sleep(2.5 * place.deadline_s)  # longer than the others wait
        return
    squared_error(parallel, batch(2, 4, 6, dtype=torch.float32)).backward()


@slow
def test_waiting_for_a_sample_count_ends_at_the_deadline(pair: Ranks):
    waiting, _ = pair(rank_1_stays_away, errors=True)
    assert waiting.kind == "WorkerLost"


def test_a_process_alone_may_balance_too():
    parallel = DataParallel(nn.Linear(3, 2), balance="auto")
    sampler = parallel.balance(BalancedSampler(40, 4, 0, 1))
    for rows in sampler:
        parallel(torch.ones(len(rows), 3)).sum().backward()
    assert torch.equal(parallel.module.weight.grad, torch.full((2, 3), 40.0))
    assert parallel.statistics().shares == (4,)
    assert torch.equal(parallel.eval()(torch.ones(1, 3)), parallel.module(torch.ones(1, 3)))


def checkpointed(model: nn.Module) -> None:
    inputs = torch.ones(2, 3, requires_grad=True)
    torch.utils.checkpoint.checkpoint(model, inputs, use_reentrant=True).sum().backward()


@pytest.mark.parametrize(
    ("field", "options", "call"),
    [
        ("balance", {}, lambda model: model.samples(3)),
        ("samples", {"balance": "auto"}, lambda model: model.samples(-1)),
        ("balance", {"balance": "auto"}, checkpointed),
    ],
)
def test_invalid_uses_of_balance_are_refused(field, options, call):
    model = DataParallel(nn.Linear(3, 2), **options)
    with refused(field):
        call(model)
