"""Batches of any recipe in a worker's replica: torch's own training on the same is the oracle."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import Dataset

from paceline.core.errors import InvalidInput
from paceline.data.dataset import TensorSamples
from paceline.devices.simulated import SimulatedDevice
from paceline.exchange.step import Learning
from paceline.links.shared_memory import SharedTensors
from paceline.recipes.optimizers import optimizer_of
from paceline.recipes.recipe import Recipe
from paceline.strategies.hogbatch.batches import BatchReader
from paceline.strategies.hogbatch.gpu_replica import GpuReplica
from paceline.strategies.hogbatch.replica import CpuReplica, tensors_of, train_next
from simulated_gpus import simulated_gpus

NUM_SAMPLES, TOKENS = 40, 11
ROWS = [torch.arange(10), torch.arange(10, 17), torch.tensor([39, 3]), torch.arange(5, 21)]
SGD = optimizer_of("sgd", 0.1, 0.9)


class Text(Dataset):
    """Mappings of tokens, with a mask."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        source = torch.Generator().manual_seed(index)
        ids = torch.randint(TOKENS, (6,), generator=source)
        return {"ids": ids, "mask": (torch.rand(6, generator=source) > 0.2).float()}


class TextNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(TOKENS, 8), nn.Linear(8, TOKENS)

    def forward(self, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(self.embedding(ids) * mask[..., None])}


def next_token(outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    logits, following = outputs["logits"][:, :-1], batch["ids"][:, 1:]
    return cross_entropy(logits.flatten(0, 1), following.flatten())


class Pairs(Dataset):
    """Two inputs of which one is a number, and a target that is a number, too."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        source = torch.Generator().manual_seed(index)
        values = torch.randn(4, generator=source, dtype=torch.float64)
        return (values, torch.tensor(index % 3)), values.sum()


class PairNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(3, 4).double(), nn.Linear(4, 1).double()

    def forward(self, values: Tensor, kind: Tensor) -> Tensor:
        return self.head(values + self.table(kind))[:, 0]


class Words(Dataset):
    """Sequences of different lengths, padded by the recipe's own collate."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        source = torch.Generator().manual_seed(index)
        return torch.randint(1, TOKENS, (1 + index % 7,), generator=source), index % 2


def padded(samples: list[Any]) -> tuple[Tensor, Tensor]:
    words = nn.utils.rnn.pad_sequence([one for one, _ in samples], batch_first=True)
    return words, torch.tensor([target for _, target in samples])


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(TOKENS, 5, padding_idx=0), nn.Linear(5, 2)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.embedding(words).sum(1))


def seeded(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(7)
        return build()

    return make


RECIPES = {
    "mappings": Recipe(model=seeded(TextNet), train=Text(), loss=next_token, name="text"),
    "several inputs": Recipe(model=seeded(PairNet), train=Pairs(), loss=mse_loss, name="pairs"),
    "padded": Recipe(
        model=seeded(Bag), train=Words(), loss=cross_entropy, collate=padded, name="words"
    ),
}


def alone(
    recipe: Recipe, rows: list[Tensor], clip_norm: float | None = None, *, bfloat16: bool = False
) -> tuple[nn.Module, list[float], list[float]]:
    """Train as one writes it in torch; return the model, the losses and the gradients' norms."""
    model = recipe.model().train()
    optimizer = SGD(model.parameters())
    losses, norms = [], []
    for own in rows:
        batch = recipe.collate([recipe.train[int(row)] for row in own])
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            if isinstance(batch, dict):
                loss = recipe.loss(model(**batch), batch)
            else:
                inputs, targets = batch
                outputs = model(*inputs) if isinstance(inputs, list) else model(inputs)
                loss = recipe.loss(outputs, targets)
        loss.backward()
        bound = torch.inf if clip_norm is None else clip_norm
        norms.append(float(clip_grad_norm_(model.parameters(), bound)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(len(own) * float(loss.detach()))
    return model, losses, norms


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("bfloat16", [False, True], ids=["float32", "bfloat16"])
def test_a_thread_trains_any_recipe_as_torch_does(recipe: Recipe, bfloat16: bool):
    memory = SharedTensors.of(tensors_of(recipe.model()), "a model")
    learning = Learning(recipe.loss, bfloat16=bfloat16)
    replica = CpuReplica(recipe, memory.tensors, SGD, worker=0, learning=learning)
    found = [replica.train(rows, 1.0, None).loss for rows in ROWS]
    expected, losses, _ = alone(recipe, ROWS, bfloat16=bfloat16)
    assert found == losses
    for name, tensor in tensors_of(expected).items():
        assert torch.equal(memory.tensors[name], tensor), name
    memory.close()


def test_bfloat16_is_not_float32():
    _, rough, _ = alone(RECIPES["mappings"], ROWS, bfloat16=True)
    _, exact, _ = alone(RECIPES["mappings"], ROWS)
    assert rough != exact


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_each_batch_of_a_thread_is_clipped_by_itself(recipe: Recipe):
    _, _, norms = alone(recipe, ROWS)
    bound = sum(norms) / len(norms)
    expected, losses, now = alone(recipe, ROWS, bound)
    assert min(now) < bound < max(now)  # otherwise this would show nothing
    memory = SharedTensors.of(tensors_of(recipe.model()), "a model")
    learning = Learning(recipe.loss, clip_norm=bound)
    replica = CpuReplica(recipe, memory.tensors, SGD, worker=0, learning=learning)
    assert [replica.train(rows, 1.0, None).loss for rows in ROWS] == losses
    for name, tensor in tensors_of(expected).items():
        assert torch.equal(memory.tensors[name], tensor), name
    memory.close()


def test_threads_clip_what_each_of_them_has_computed():
    """One with a steep gradient and one with none: together they would be within the bound."""
    inputs, targets = torch.tensor([[100.0], [0.0]]), torch.tensor([[0.0], [0.0]])

    def build() -> nn.Module:
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        return model

    recipe = Recipe(model=build, train=TensorSamples(inputs, targets), loss=mse_loss, name="steep")
    memory = SharedTensors.of(tensors_of(build()), "a model")
    learning, make = Learning(recipe.loss, clip_norm=0.5), optimizer_of("sgd", 1.0, 0.0)
    replica = CpuReplica(recipe, memory.tensors, make, worker=0, threads=2, learning=learning)
    replica.train(torch.tensor([0, 1]), 1.0, None)
    # Half of the batch's rate, as each has one of two samples; the other thread changes nothing.
    assert memory.tensors["weight"].item() == pytest.approx(1 - 0.5 * 0.5, rel=1e-4)
    memory.close()


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    with simulated_gpus() as (found,):
        found.delays = lambda stream, what: 0.0
        yield found


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("clips", [False, True])
def test_a_gpu_alone_trains_any_recipe_as_torch_does(device, recipe: Recipe, depth, clips):
    bound = sum(alone(recipe, ROWS)[2]) / len(ROWS) if clips else None
    memory = SharedTensors.of(tensors_of(recipe.model()), "a model")
    unpin = device.pin(memory.memory)
    learning = Learning(recipe.loss, clip_norm=bound)
    replica = GpuReplica(recipe, memory, SGD, 0, device, depth, learning=learning)
    done = [result for rows in ROWS for result in train_next(replica, rows, 1.0, None)]
    while replica.num_begun:
        done.append(replica.finish())
    expected, losses, _ = alone(recipe, ROWS, bound)
    assert [one.loss for one in done] == pytest.approx(losses, rel=1e-4)
    for name, tensor in tensors_of(expected).items():
        torch.testing.assert_close(memory.tensors[name], tensor.detach(), rtol=1e-4, atol=1e-5)
    unpin()
    memory.close()


class Watched(Dataset):
    """Counts the threads that read at the same time."""

    def __init__(self) -> None:
        self.num_reading = self.most_reading = 0

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.num_reading += 1
        self.most_reading = max(self.most_reading, self.num_reading)
        time.sleep(1e-3)  # in which others would read, too
        self.num_reading -= 1
        return torch.full((3,), float(index)), index % 2


def test_a_data_set_is_read_by_one_thread_at_a_time():
    data = Watched()
    recipe = Recipe(model=lambda: nn.Linear(3, 2), train=data, loss=cross_entropy, name="watched")
    memory = SharedTensors.of(tensors_of(recipe.model()), "a model")
    make = optimizer_of("sgd", 0.1, 0.0)
    replica = CpuReplica(recipe, memory.tensors, make, worker=0, threads=4)
    replica.train(torch.arange(24), 1.0, None)
    assert data.most_reading == 1
    memory.close()


def test_tensors_are_read_by_all_threads_at_once():
    inputs, targets = torch.randn(8, 3), torch.arange(8)
    recipe = Recipe(
        model=nn.Module, train=TensorSamples(inputs, targets), loss=cross_entropy, name="tensors"
    )
    reader, together = BatchReader(recipe), threading.Barrier(2)

    class Meeting(TensorSamples):
        def __getitems__(self, indices: Any) -> Any:
            together.wait(30)
            return super().__getitems__(indices)

    reader._samples = Meeting(inputs, targets)
    other = threading.Thread(target=reader.read, args=(torch.arange(3),))
    other.start()
    assert torch.equal(reader.read(torch.tensor([2, 5]))[0], inputs[[2, 5]])
    other.join()


def failing(**changes: Any) -> Recipe:
    """A recipe that is right but for these fields."""
    right: dict[str, Any] = {
        "model": lambda: nn.Linear(3, 2),
        "train": TensorSamples(torch.randn(NUM_SAMPLES, 3), torch.arange(NUM_SAMPLES) % 2),
        "loss": cross_entropy,
        "name": "mine",
    }
    return Recipe(**right | changes)


class Broken(Dataset):
    """Cannot be read from sample 5 on; `wide`: is wider there."""

    def __init__(self, *, wide: bool) -> None:
        self.wide = wide

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index < 5:
            return torch.zeros(3), 1
        if self.wide:
            return torch.zeros(4), 1
        raise OSError("disk on fire")


class Torn(TensorSamples):
    """Makes whole batches itself, and fails."""

    def __getitems__(self, indices: Any) -> Any:
        raise KeyError("torn")


def one_each(outputs: Tensor, targets: Tensor) -> Tensor:
    """A scalar for one sample only."""
    return cross_entropy(outputs, targets, reduction="none").squeeze()


class Choosy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        if len(inputs) > 1:
            raise ValueError("one at a time")
        return self.head(inputs)


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        (failing(train=Broken(wide=False)), "mine: sample 5 of its data cannot be read: OSError"),
        (failing(train=Broken(wide=True)), "mine: samples 3, 4, 5, ... cannot be made a batch"),
        (
            failing(train=Torn(torch.zeros(40, 3), torch.zeros(40))),
            "mine: its data cannot be read at samples 3, 4, 5, ...: KeyError: 'torn'",
        ),
        (failing(loss=one_each), "loss of mine: is float32 4; it must be a scalar"),
        (failing(loss=lambda outputs, targets: 1.0), "loss of mine: is float; it must be a scalar"),
        (
            failing(loss=lambda outputs, targets: outputs.detach().sum()),
            "loss of mine: does not depend on the model's parameters",
        ),
        (
            failing(loss=lambda outputs, targets: outputs["logits"]),
            "loss of mine: fails on outputs float32 4x2 and targets int64 4: ",
        ),
        (failing(model=Choosy), "model mine: fails on a batch, float32 4x3: ValueError: one at"),
    ],
)
def test_what_is_wrong_with_a_recipe_is_named(recipe: Recipe, said: str):
    memory = SharedTensors.of(tensors_of(recipe.model()), "a model")
    replica = CpuReplica(recipe, memory.tensors, optimizer_of("sgd", 0.1, 0.0), worker=0)
    with pytest.raises(InvalidInput) as raised:
        replica.train(torch.arange(3, 7), 1.0, None)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)
    memory.close()
