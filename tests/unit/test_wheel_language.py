"""Cuts of language models and of models with several inputs; tied weights."""

import json
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from language_nets import WIDTH, Attention
from nets import Net
from paceline.core.settings import TrainSettings
from paceline.rpc.workers import difference
from paceline.strategies.wheel.config import MOMENTUM, Wheel
from paceline.strategies.wheel.job import training_job
from paceline.strategies.wheel.split import split
from paceline.training.data.batch import call
from paceline.training.models import describe
from paceline.training.models.halves import cut, tied
from paceline.training.recipes.losses import next_token_loss
from paceline.training.recipes.named import given
from paceline.training.recipes.recipe import Recipe
from refusals import refused

LENGTH = 12


class Decoder(nn.Module):
    """A typical decoder: `forward` reads and checks sizes, and makes positions."""

    def __init__(self, vocabulary: int, is_tied: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Attention() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, vocabulary, bias=is_tied)
        if is_tied:
            self.lm_head.weight = self.tokens.weight

    def forward(
        self, ids: Tensor, mask: Tensor | None = None, labels: Tensor | None = None
    ) -> Tensor | dict[str, Tensor]:
        _, length = ids.size()
        assert length <= LENGTH, "too long"
        if ids.dim() != 2:
            raise ValueError("(samples, tokens)")
        places = torch.arange(0, length, dtype=torch.long, device=ids.device)
        x = self.tokens(ids) + self.positions(places)
        if mask is not None:
            x = x * mask[:, :, None] + torch.zeros(ids.shape[0], 1, 1)
        for block in self.blocks:
            x = x + block(x, mask=None)
        logits = self.lm_head(self.norm(x))
        return logits if mask is None else {"logits": logits, "all": (logits.sum(-1), 3)}


IDS = torch.arange(4 * LENGTH).view(4, LENGTH) % 30
MASK = (IDS > 5).float()


@pytest.mark.parametrize(
    "inputs",
    [
        IDS,
        (IDS,),
        (IDS, MASK),
        {"ids": IDS, "mask": MASK},
        {"mask": MASK, "ids": IDS, "labels": IDS},
    ],
)
def test_halves_compute_the_model_of_any_inputs(inputs: Any):
    """Bit for bit, also for the smaller last batch of an epoch; outputs may be any pytree."""
    torch.manual_seed(1)
    model = Decoder(30)
    halves = cut(model, inputs, "lm_head")
    assert halves.head_names == ("lm_head.weight",)
    assert halves.crossing == (LENGTH, WIDTH)
    for count in (4, 3, 1):
        part = torch.utils._pytree.tree_map(lambda leaf, n=count: leaf[:n], inputs)
        found = halves.head(call(halves.body, part))
        expected = call(model, part)
        assert type(found) is type(expected)
        for one, two in zip(tree_leaves(found), tree_leaves(expected), strict=True):
            assert one is two or one == two if isinstance(one, int) else torch.equal(one, two)


def test_a_tied_embedding_is_named():
    assert "tokens.weight" in tied(Decoder(30, is_tied=True), "lm_head")
    assert tied(Decoder(30), None) == ""


def described(vocabulary: int, samples: int):
    return describe(Decoder(vocabulary), torch.zeros(samples, LENGTH, dtype=torch.int64))


@pytest.mark.parametrize(("vocabulary", "samples"), [(50_257, 32), (256, 16)])
def test_a_large_vocabulary_and_few_tokens_make_a_head(vocabulary: int, samples: int):
    """Linear layers within blocks multiply several tokens per sample, and make no head."""
    head = split(described(vocabulary, samples), Wheel()).head
    assert [layer.name for layer in head.layers] == ["lm_head"]
    nbytes = 4 * samples * LENGTH * WIDTH, 4 * vocabulary * WIDTH
    assert (head.input_nbytes, head.gradient_nbytes) == nbytes


def test_a_small_vocabulary_and_many_tokens_make_no_head_unless_requested():
    """The activations of 64 x 12 tokens have more bytes than the output layer."""
    work = described(256, 64)
    with refused("strategy"):
        split(work, Wheel())
    assert split(work, Wheel(head="lm_head")).head.layers[0].name == "lm_head"


def test_linear_layers_after_attention_make_a_head():
    """It has one vector per sample, so its layers multiply each sample once."""

    def compute(net: nn.Module, ids: Tensor) -> Tensor:
        x = net.block(net.tokens(ids), mask=None)
        return net.last(torch.relu(net.wide(x[:, 0])))

    body = {"tokens": nn.Embedding(30, WIDTH), "block": Attention()}
    model = Net(compute, **body, wide=nn.Linear(WIDTH, 500), last=nn.Linear(500, 20))
    work = describe(model, torch.zeros(16, LENGTH, dtype=torch.int64))
    assert [layer.name for layer in split(work, Wheel()).head.layers] == ["wide", "last"]


WINDOWS = [(IDS[index % 4], IDS[index % 4]) for index in range(40)]
LONGER = [(ids, torch.cat([ids, IDS[0]])) for ids, _ in WINDOWS]


def job_of(is_tied: bool = False, train: Any = WINDOWS, loss: Any = next_token_loss, **more: Any):
    recipe = Recipe(model=partial(Decoder, 5000, is_tied), train=train, loss=loss)
    own = {"strategy": "wheel", "workers": 2, "batch_size": 4, "momentum": MOMENTUM}
    with given(recipe) as name:
        settings = TrainSettings(model=name, **(own | more))
        session = SimpleNamespace(settings=settings, config=Wheel(workers=2))
        return training_job(session, settings, torch.device("cpu"))


def test_a_recipe_object_needs_workers_on_this_machine_and_an_untied_head():
    spec = job_of(steps=7).spec
    assert (spec.head, spec.num_steps, spec.data, spec.precision) == ("lm_head", 7, None, "float32")
    with refused("model"):
        job_of(listen="tcp://127.0.0.1:0")
    with refused("strategy"):
        job_of(is_tied=True)


def test_hub_and_body_agree_on_the_structure_of_a_sample():
    """They also agree on the number of samples; `difference` returns the first difference."""
    here, there = (
        job_of(train=train, loss=lambda outputs, _: outputs.mean()).layout
        for train in (WINDOWS, LONGER)
    )
    assert difference(here, here) is None
    assert "int64 [24]" in difference(here, there)
    assert json.loads(here)["samples"] == 40


def test_the_default_momentum_is_for_sgd_only():
    job = job_of()
    assert job.optimizer(job.model).param_groups[0]["momentum"] == MOMENTUM
    for name in ("adam", "rmsprop"):
        optimizer = job_of(optimizer=name).optimizer
        assert not optimizer(job.model).param_groups[0].get("momentum")
    with refused("momentum"):
        job_of(optimizer="adam", momentum=0.5)
