"""Training of any recipe by replicas on CPUs and a GPU, compared with plain torch."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import Dataset

import own_recipes
from hogbatch_replicas import classifying, net, on_gpu, on_threads, samples
from nets import Net
from paceline.core.plan import Kind
from paceline.exchange.step import Learning
from paceline.strategies.hogbatch.replica import tensors_of
from paceline.training.data.dataset import TensorSamples
from paceline.training.recipes.optimizers import OptimizerFactory, optimizer_of
from paceline.training.recipes.recipe import Recipe
from refusals import refused

NUM_SAMPLES, TOKENS = 40, 11
ROWS = [torch.arange(10), torch.arange(10, 17), torch.tensor([39, 3]), torch.arange(5, 21)]
RATE = 0.1
MOMENTUM, PLAIN = optimizer_of("sgd", RATE, 0.9), optimizer_of("sgd", RATE, 0.0)


class Samples(Dataset):
    """Samples that are created when they are read."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def words(index: int) -> tuple[Tensor, int]:
    """Create a sequence; lengths differ, and the recipe's `collate` pads them."""
    source = torch.Generator().manual_seed(index)
    return torch.randint(1, TOKENS, (1 + index % 7,), generator=source), index % 2


def tied() -> nn.Module:
    model = own_recipes.TokenModel()
    model.head.weight = model.embedding.weight
    return model


def padded(samples: list[Any]) -> tuple[Tensor, Tensor]:
    sequences = nn.utils.rnn.pad_sequence([one for one, _ in samples], batch_first=True)
    return sequences, torch.tensor([target for _, target in samples])


def bag() -> nn.Module:
    embedding = nn.Embedding(TOKENS, 5, padding_idx=0)
    compute = lambda net, words: net.head(net.embedding(words).sum(1))  # noqa: E731
    return Net(compute, embedding=embedding, head=nn.Linear(5, 2))


def seeded(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(7)
        return build()

    return make


RECIPES = {
    "mappings": replace(own_recipes.fields(), model=seeded(own_recipes.Fields)),
    "tied": own_recipes.tokens(model=seeded(tied)),
    "padded": Recipe(
        model=seeded(bag), train=Samples(words), loss=cross_entropy, collate=padded, name="words"
    ),
}
NET = classifying(net, samples())
each_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def alone(
    recipe: Recipe,
    clip_norm: float = torch.inf,
    *,
    make: OptimizerFactory = MOMENTUM,
    rates: Sequence[float] = (1.0,) * len(ROWS),
    bfloat16: bool = False,
) -> tuple[dict[str, Tensor], list[float], list[float]]:
    """Train in plain torch; return the tensors, the losses and the gradient norms."""
    model = recipe.model().train()
    optimizer = make(list(model.parameters()))
    losses, norms = [], []
    for own, rate in zip(ROWS, rates, strict=True):
        batch = recipe.collate([recipe.train[int(row)] for row in own])
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            if isinstance(batch, dict):
                loss = recipe.loss(model(**batch), batch)
            else:
                loss = recipe.loss(model(batch[0]), batch[1])
        loss.backward()
        norms.append(float(clip_grad_norm_(model.parameters(), clip_norm)))
        optimizer.param_groups[0]["lr"] = RATE * rate
        optimizer.step()
        optimizer.zero_grad()
        losses.append(len(own) * float(loss.detach()))
    return tensors_of(model), losses, norms


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@each_recipe
@pytest.mark.parametrize("how", ["float32", "bfloat16", "clipped"])
def test_a_thread_trains_any_recipe_as_torch_does(recipe: Recipe, how: str):
    """Gradients are clipped for each batch separately."""
    _, plainly, norms = alone(recipe)
    bound = sum(norms) / len(norms) if how == "clipped" else torch.inf
    expected, losses, now = alone(recipe, bound, bfloat16=how == "bfloat16")
    assert how != "clipped" or min(now) < bound < max(now)  # else the test shows nothing
    assert how != "bfloat16" or recipe is not RECIPES["mappings"] or losses != plainly
    clip_norm = bound if how == "clipped" else None
    learning = Learning(recipe.loss, bfloat16=how == "bfloat16", clip_norm=clip_norm)
    with on_threads(recipe, MOMENTUM, learning=learning) as (replica, shared):
        assert [replica.train(rows, 1.0, None).loss for rows in ROWS] == losses
        assert_same(shared, expected)


@pytest.mark.parametrize("slow", [1.0, 3.0])
@pytest.mark.parametrize(
    ("name", "momentum"), [("sgd", 0.0), ("SGD", 0.9), ("adam", 0.0), ("rmsprop", 0.0)]
)
def test_a_thread_trains_with_any_optimizer_and_rate(name: str, momentum: float, slow: float):
    make, rates = optimizer_of(name, RATE, momentum), (1.0, 0.5, 2.0, 1.0)
    expected, losses, _ = alone(NET, make=make, rates=rates)
    with on_threads(NET, make, slow=slow) as (replica, shared):
        done = [replica.train(*of, None) for of in zip(ROWS, rates, strict=True)]
        assert [one.loss for one in done] == pytest.approx(losses)
        assert_same(shared, expected)


def test_each_thread_clips_its_own_gradient():
    """Clipping the gradient of the whole batch would move the weight twice as far."""
    data = TensorSamples(torch.tensor([[100.0], [0.0]]), torch.tensor([[0.0], [0.0]]))
    build = seeded(lambda: nn.Linear(1, 1, bias=False))
    recipe, start = Recipe(model=build, train=data, loss=mse_loss, name="steep"), build().weight
    learning, make = Learning(recipe.loss, clip_norm=0.5), optimizer_of("sgd", 1.0, 0.0)
    with on_threads(recipe, make, threads=2, learning=learning) as (replica, shared):
        replica.train(torch.tensor([0, 1]), 1.0, None)
        # Each thread has one of two samples and half the learning rate; one gradient is zero.
        moved = abs(shared["weight"].item() - start.item())
    assert moved == pytest.approx(0.5 * 0.5, rel=1e-4)


def test_each_thread_makes_an_update_in_proportion_to_its_samples():
    """With a tiny learning rate updates add up, independently of their order."""
    build = seeded(lambda: nn.Linear(6, 4, bias=False))
    tiny = 1e-4  # second-order effects are below the precision of float32
    recipe, rows = classifying(build, samples()), torch.arange(11)  # 4, 4 and 3
    with on_threads(recipe, optimizer_of("sgd", tiny, 0.0), threads=3) as (replica, shared):
        replica.train(rows, 1.0, None)
        replica.train(rows[:2], 1.0, None)
        expected = build()
        for count in (11, 2):
            inputs, targets = samples(count=count)
            cross_entropy(expected(inputs), targets).backward()
        change = shared["weight"] - build().weight
        torch.testing.assert_close(change, -tiny * expected.weight.grad, rtol=0.05, atol=1e-8)


def test_a_nan_loss_leaves_the_parameters_unchanged():
    recipe = classifying(net, (samples()[0] * torch.nan, samples()[1]))
    with on_threads(recipe, PLAIN) as (replica, shared):
        before = {name: shared[name].clone() for name, _ in net().named_parameters()}
        done = replica.train(torch.arange(4), 1.0, None)
        assert done.loss != done.loss
        assert_same(shared, before)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_traced_batch_has_the_layers_of_the_model(threads: int):
    with on_threads(NET, PLAIN, worker=5, threads=threads, slow=2.0) as (replica, _):
        replica.train(torch.arange(8), 1.0, None)
        assert replica.spans == []
        replica.train(torch.arange(8), 1.0, 0)
    by_time = sorted(replica.spans, key=lambda span: (span.start_s, span.end_s))
    layers = ["0", "1", "3"]
    parts = [(Kind.FORWARD, one) for one in layers] + [(Kind.BACKWARD, one) for one in layers[::-1]]
    assert [(span.kind, span.part) for span in by_time] == [*parts, (Kind.STEP, "")]
    assert {(span.step, span.worker) for span in by_time} == {(0, 5)}
    for earlier, later in pairwise(by_time):
        assert later.start_s >= earlier.end_s - 1e-9
    assert by_time[-1].num_samples == 8


@each_recipe
@pytest.mark.parametrize(("depth", "clips"), [(1, True), (3, False)])
def test_a_gpu_alone_trains_any_recipe_as_torch_does(device, recipe: Recipe, depth, clips):
    bound = sum(alone(recipe)[2]) / len(ROWS) if clips else None
    learning = Learning(recipe.loss, clip_norm=bound)
    with on_gpu(recipe, MOMENTUM, device, learning, depth) as (replica, memory):
        done = [result for rows in ROWS for result in replica.take(rows, 1.0, None)]
        done += replica.done(waits=True)
    expected, losses, _ = alone(recipe, bound or torch.inf)
    assert [one.loss for one in done] == pytest.approx(losses, rel=1e-4)
    for name, tensor in expected.items():
        torch.testing.assert_close(memory.tensors[name], tensor.detach(), rtol=1e-4, atol=1e-5)


def test_a_data_set_is_read_by_one_thread_at_a_time():
    reading = threading.Lock()

    def alone(index: int) -> tuple[Tensor, int]:
        assert reading.acquire(blocking=False)
        time.sleep(1e-3)  # long enough for another thread to read at the same time
        reading.release()
        return torch.full((6,), float(index)), index % 2

    with on_threads(replace(NET, train=Samples(alone)), PLAIN, threads=4) as (replica, _):
        replica.train(torch.arange(24), 1.0, None)


def test_tensors_are_read_by_all_threads_at_once():
    together = threading.Barrier(2, timeout=30)

    class Meeting(TensorSamples):
        def __getitems__(self, indices: Any) -> Any:
            together.wait()
            return super().__getitems__(indices)

    meeting = replace(NET, train=Meeting(*samples()))
    with on_threads(meeting, PLAIN, threads=2) as (replica, _):
        replica.train(torch.arange(4), 1.0, None)


def raising(*_: object) -> Any:
    raise OSError("disk on fire")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"train": Samples(raising)}, "classifier"),
        ({"train": Samples(lambda index: (torch.zeros(6 + index // 5), 1))}, "classifier"),
        ({"loss": lambda outputs, targets: 1.0}, "loss of classifier"),
        ({"model": lambda: Net(raising, layer=nn.Linear(6, 2))}, "model"),
    ],
)
def test_what_is_wrong_with_a_recipe_is_named(changes: dict[str, Any], field: str):
    with on_threads(replace(NET, **changes), PLAIN) as (replica, _), refused(field):
        replica.train(torch.arange(3, 7), 1.0, None)
