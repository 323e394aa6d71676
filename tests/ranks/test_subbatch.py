"""Models whose head is split among ranks, against one process with plain modules."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from paceline.data.dataset import TensorSamples
from paceline.exchange.step import SGD, Share
from paceline.links.rendezvous import joined
from paceline.models import describe
from paceline.recipes.classification import accuracy
from paceline.record.clock import HostClock
from paceline.strategies.subbatch.build import split
from paceline.strategies.subbatch.config import SubBatch
from paceline.strategies.subbatch.evaluation import evaluate
from paceline.strategies.subbatch.layers import dropout_seed
from paceline.strategies.subbatch.recorder import HeadRecorder
from paceline.strategies.subbatch.state import load, save
from paceline.strategies.subbatch.trainer import SplitModel, SplitTrainer
from pair import Ranks

slow = pytest.mark.slow
FEATURES, CLASSES, MOST = 6, 5, 9  # the last one: samples of a rank
SEED, HEADER = 3, 40
HEAD_VALUES = 11 * (10 + 1) + 7 * 11 + 5 * (7 + 1)
MOMENTUM = SGD(learning_rate=0.1, momentum=0.9)
Build = Callable[[], nn.Module]


class Net(nn.Module):
    """Widths that 2 and 3 workers do not divide."""

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


def count_of(rank: int, step: int) -> int:
    """Batches are uneven, and now and then smaller than there are workers."""
    return 1 + (5 * rank + 3 * step) % MOST


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(1 + 1000 * rank + step)
    count = count_of(rank, step)
    inputs = torch.randn(count, FEATURES, generator=source)
    return inputs, torch.randint(CLASSES, (count,), generator=source)


def whole(step: int) -> tuple[Tensor, Tensor]:
    inputs, targets = zip(
        *(batch(rank, step) for rank in range(dist.get_world_size())), strict=True
    )
    return torch.cat(inputs), torch.cat(targets)


def places(size: int, step: int, num_passes: int) -> list[list[int]]:
    """The samples of each sub-batch, as the docstring of the strategy's plan has them."""
    passes: list[list[int]] = [[] for _ in range(num_passes)]
    first = 0
    for rank in range(size):
        whole_part, rest = divmod(count_of(rank, step), num_passes)
        for number, rows in enumerate(passes):
            part = whole_part + (number < rest)
            rows.extend(range(first, first + part))
            first += part
    return [rows for rows in passes if rows]


class Place:
    """This rank, and what trains on it; in float64 unless told."""

    def __init__(self, *, is_float64: bool = True, **config: Any) -> None:
        torch.set_default_dtype(torch.float64 if is_float64 else torch.float32)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.group = joined(torch.device("cpu"), 20.0)
        self.config = SubBatch(workers=self.size, head="head.0", **config)

    def trainer(self, build: Build = Net, sgd: SGD = MOMENTUM) -> SplitTrainer:
        workload = describe(build(), torch.zeros(MOST, FEATURES), "net")
        model = split(build, workload, self.config, self.group, SEED)
        recorder = HeadRecorder(HostClock(), f"cpu{self.rank}", self.rank)
        return SplitTrainer(
            model, self.config, self.group, recorder, sgd.optimizer, sgd.learning_rate, SEED
        )

    def shares(self) -> Iterator[Share]:
        for step in range(1000):
            yield Share(*batch(self.rank, step), 1.0)

    def compare(self, model: SplitModel, build: Build, oracle: nn.Module) -> None:
        """Save the model, read it in one process, and compare: rank 0 does."""
        path = Path("model.safetensors")
        save(path, model.module, model.shardings, self.group)
        if self.rank:
            return
        found = build()
        load_model(found, str(path))
        for one, other in zip(
            found.state_dict().values(), oracle.state_dict().values(), strict=True
        ):
            assert float((one - other).abs().max() / other.abs().max().clamp(min=1e-3)) < 1e-12


def built(build: Build) -> nn.Module:
    torch.manual_seed(SEED)
    return build()


def seeded(model: nn.Module) -> list[int]:
    """Have plain dropouts of a head draw what a run draws; the step is the list's only entry."""
    step = [0]

    def seeds(name: str) -> Callable[..., None]:
        def seed(*_: object) -> None:
            torch.manual_seed(dropout_seed(SEED, step[0], name))

        return seed

    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_pre_hook(seeds(name))
    return step


def together(place: Place, num_steps: int) -> tuple[SplitTrainer, nn.Module]:
    """Train as one process with plain modules does beside it."""
    trainer, source = place.trainer(), place.shares()
    oracle = built(Net)
    optimizer, step = MOMENTUM.optimizer(oracle), seeded(oracle)
    for step[0] in range(num_steps):
        loss = float(trainer.step(source))
        inputs, targets = whole(step[0])
        optimizer.zero_grad()
        expected = cross_entropy(oracle(inputs), targets)
        expected.backward()
        optimizer.step()
        assert abs(loss / expected.item() - 1) < 1e-12
    return trainer, oracle


def equal() -> int:
    """Once a step, no codec: as one process with plain modules; return the head's own values."""
    place, num_steps = Place(), 50
    trainer, oracle = together(place, num_steps)
    place.compare(trainer.model, Net, oracle)
    loss, right = evaluate(trainer, TensorSamples(*whole(num_steps)), accuracy)
    inputs, targets = whole(num_steps)
    scores = oracle.eval()(inputs)
    mine = slice(place.rank, None, place.size)
    assert right == int((scores.argmax(1) == targets)[mine].sum())
    expected = float(cross_entropy(scores[mine], targets[mine], reduction="sum"))
    assert abs(loss / expected - 1) < 1e-11
    trainer.close()
    return sum(p.numel() for layer in trainer.model.head for p in layer.parameters)


def loaded() -> None:
    """Take over what another number of ranks has written."""
    trainer, path = Place().trainer(), Path("model.safetensors")
    model, shardings = trainer.model.module, trainer.model.shardings
    load(path, model, shardings, dist.get_rank())
    found = Net()
    load_model(found, str(path))
    for name, tensor in model.state_dict().items():
        own, expected = shardings.get(name.rpartition(".")[0]), found.state_dict()[name]
        if own is not None:
            expected = own.shard(dist.get_rank())(expected)
        assert torch.equal(tensor, expected), name
    trainer.close()


def check_equal(ranks: Ranks, folder: Path) -> None:
    own = ranks(equal, cwd=folder)
    assert sum(own) == HEAD_VALUES
    assert max(own) < HEAD_VALUES / ranks.size + 2 * 11  # the head is on no rank whole


def test_fifty_steps_are_those_of_one_process(pair: Ranks, tmp_path: Path):
    check_equal(pair, tmp_path)


@slow
def test_fifty_steps_of_three_are_those_of_one_process(pair: Ranks, triple: Ranks, tmp_path: Path):
    check_equal(triple, tmp_path)
    pair(loaded, cwd=tmp_path)
    pair(equal, cwd=tmp_path)
    triple(loaded, cwd=tmp_path)


def sized(sizes: list[int]) -> list[int]:
    """Sub-batches of any size train as one process does; return the bytes of the loss's terms."""
    sent = []
    for sub_batch in sizes:
        place = Place(sub_batch=sub_batch)
        trainer, oracle = together(place, 5)
        place.compare(trainer.model, Net, oracle)
        sent.append(trainer.sent_of_loss.activations_sent)
        trainer.close()
    return sent


@pytest.mark.parametrize(
    ("place", "sizes"),
    [("pair", [2, 5, 18]), pytest.param("triple", [3, 4, 5, 8, 10, 26, 27], marks=slow)],
)
def test_any_size_of_sub_batch_trains_as_one_process_does(request, tmp_path: Path, place, sizes):
    """The terms of the loss are the same bytes in all, and have a header in each sub-batch."""
    ranks: Ranks = request.getfixturevalue(place)
    sent = ranks(sized, sizes, cwd=tmp_path)[0]
    for sub_batch, nbytes in zip(sizes, sent, strict=True):
        fewer = MOST - min(MOST, -(-ranks.size * MOST // sub_batch))
        assert sent[0] - nbytes == 5 * (ranks.size - 1) * fewer * HEADER


def by_passes(updates: str, sub_batch: int | None) -> None:
    """A head with statistics, or updated per sub-batch, as one process takes the sub-batches."""

    def build() -> nn.Module:
        return Net(p=0.0, norm=updates == "step")

    sgd, place = SGD(learning_rate=0.05, momentum=0.9), Place(updates=updates, sub_batch=sub_batch)
    size = place.size
    num_passes = min(MOST, size if sub_batch is None else -(-size * MOST // sub_batch))
    trainer, source = place.trainer(build, sgd), place.shares()
    oracle = built(build)
    body, head = sgd.optimizer(oracle.body), sgd.optimizer(oracle.head)
    for step in range(6):
        trainer.step(source)
        inputs, targets = whole(step)
        activations = oracle.body(inputs)
        errors = torch.zeros_like(activations)
        for rows in places(size, step, num_passes):
            own = activations[rows].detach().requires_grad_()
            loss = cross_entropy(oracle.head(own), targets[rows])
            share = len(rows) / len(targets)
            if updates == "step":
                (loss * share).backward()
                errors[rows] = own.grad
            else:
                loss.backward()
                errors[rows] = own.grad * share
                head.step()
                head.zero_grad()
        activations.backward(errors)
        body.step()
        if updates == "step":
            head.step()
        for optimizer in (body, head):
            optimizer.zero_grad()
    place.compare(trainer.model, build, oracle)
    trainer.close()


@pytest.mark.parametrize("place", ["pair", pytest.param("triple", marks=slow)])
@pytest.mark.parametrize(
    ("updates", "sub_batch"), [("step", None), ("sub-batch", None), ("sub-batch", 5)]
)
def test_sub_batches_are_those_of_one_process(request, tmp_path, place, updates, sub_batch):
    request.getfixturevalue(place)(by_passes, updates, sub_batch, cwd=tmp_path)


def encoded() -> list[float]:
    """All that travels is encoded: training goes on, and less is sent."""
    sent, losses = [], []
    for codec in (None, "dynamic8"):
        purposes = ("activations", "activation_gradients", "gradients")
        place = Place(is_float64=False, **dict.fromkeys(purposes, codec))
        trainer, source = place.trainer(Net, SGD(0.3, 0.9)), place.shares()
        losses.append([float(trainer.step(source)) for _ in range(15)])
        sent.append(trainer.sent_nbytes)
        trainer.close()
    plain, smaller = sent
    for purpose in ("activations", "activation_gradients"):
        assert 0 < smaller[purpose] < plain[purpose]
    assert plain["loss"] == smaller["loss"]
    assert max(abs(a - b) for a, b in zip(*losses, strict=True)) < 0.2
    return losses[1]


@slow
def test_what_is_encoded_is_less_and_trains_alike_on_all_ranks(triple: Ranks):
    first, *others = triple(encoded)
    assert others == [first] * 2


def poisoned(layer: str) -> None:
    """One rank's part of a layer becomes NaN: all say of which rank and layer."""
    place = Place()
    trainer, source = place.trainer(), place.shares()
    trainer.step(source)
    if place.rank == place.size - 1:
        with torch.no_grad():
            trainer.model.module.get_submodule(layer).weight[0, 0] = torch.nan
    trainer.step(source)


@pytest.mark.parametrize("layer", ["head.0", pytest.param("head.6", marks=slow)])
def test_a_nan_in_one_part_is_told_on_all_ranks(pair: Ranks, layer: str):
    for failure in pair(poisoned, layer, errors=True):
        assert failure.kind == "NonFinite"
        assert f"layer {layer!r}" in failure.text
        assert "rank 1 " in failure.text
