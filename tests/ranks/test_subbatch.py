"""Models with a head split across ranks, compared with one process."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from language_nets import IGNORED, TOKENS, VOCABULARY, Language
from paceline.exchange.step import Learning
from paceline.training.data.dataset import TensorSamples
from paceline.training.recipes.losses import accuracy, bits_per_byte, next_token_loss
from pair import Ranks
from split_heads import Batch, Split, compare_by_passes, trained_together

slow = pytest.mark.slow
FEATURES, CLASSES, MOST = 6, 5, 9  # MOST: largest number of samples per rank
HEADER = 40
HEAD_VALUES = 11 * (10 + 1) + 7 * 11 + 5 * (7 + 1)


class Net(nn.Module):
    """A net with layer widths that are not divisible by 2 or 3 workers."""

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


def rows(step: int, size: int) -> Batch:
    """Return a step's batch; ranks have unequal sample counts, some below the number of workers."""
    counts = [1 + (5 * rank + 3 * step) % MOST for rank in range(size)]
    source = torch.Generator().manual_seed(1 + step)
    inputs = torch.randn(sum(counts), FEATURES, generator=source)
    return inputs, torch.randint(CLASSES, (len(inputs),), generator=source), counts


def classifier(lr: float = 0.1, build: Any = Net, **more: Any) -> Split:
    make = partial(torch.optim.SGD, lr=lr, momentum=0.9)
    return Split(build, lambda _: torch.zeros(MOST, FEATURES), rows, make, head="head.0", **more)


def equal() -> int:
    """Train without a codec, compare with plain modules; count this rank's head values."""
    own, num_steps = classifier(), 50
    oracle = trained_together(own, num_steps)
    own.check_tests(oracle, TensorSamples(*rows(num_steps, own.size)[:2]), accuracy)
    own.compare(oracle)
    return sum(p.numel() for layer in own.model.head for p in layer.parameters)


@pytest.mark.parametrize("place", ["pair", pytest.param("triple", marks=slow)])
def test_fifty_steps_match_one_process(ranks: Ranks, tmp_path: Path):
    own = ranks(equal, cwd=tmp_path)
    assert sum(own) == HEAD_VALUES
    assert max(own) < HEAD_VALUES / ranks.size + 2 * 11  # no rank has the whole head


def sized(sizes: list[int]) -> list[int]:
    """Compare each sub-batch size with one process; return the bytes sent for the loss."""
    sent = []
    for sub_batch in sizes:
        own = classifier(sub_batch=sub_batch)
        own.compare(trained_together(own, 5))
        sent.append(own.trainer.sent_of_loss.activations_sent)
    return sent


@pytest.mark.parametrize(
    ("place", "sizes"),
    [("pair", [2, 5, 18]), pytest.param("triple", [3, 4, 5, 8, 10, 26, 27], marks=slow)],
)
def test_any_sub_batch_size_matches_one_process(ranks: Ranks, tmp_path: Path, sizes):
    """Each sub-batch size sends the same loss terms, plus one header per sub-batch."""
    sent = ranks(sized, sizes, cwd=tmp_path)[0]
    for sub_batch, nbytes in zip(sizes, sent, strict=True):
        fewer = MOST - min(MOST, -(-ranks.size * MOST // sub_batch))
        assert sent[0] - nbytes == 5 * (ranks.size - 1) * fewer * HEADER


def by_passes(updates: str, sub_batch: int | None) -> None:
    """Compare BatchNorm1d or per-sub-batch updates with the same sub-batches in one process."""
    build = partial(Net, p=0.0, norm=updates == "step")
    own = classifier(0.05, build, updates=updates, sub_batch=sub_batch)
    num_passes = own.size if sub_batch is None else -(-own.size * MOST // sub_batch)
    compare_by_passes(own, min(MOST, num_passes), 6)


@pytest.mark.parametrize("place", ["pair", pytest.param("triple", marks=slow)])
@pytest.mark.parametrize(
    ("updates", "sub_batch"), [("step", None), ("sub-batch", None), ("sub-batch", 5)]
)
def test_sub_batches_match_one_process(ranks: Ranks, tmp_path, updates, sub_batch):
    ranks(by_passes, updates, sub_batch, cwd=tmp_path)


def encoded() -> list[float]:
    """Train with and without codecs, and check that the losses are close."""
    losses, purposes = [], ("activations", "activation_gradients", "gradients")
    for codec in (None, "dynamic8"):
        own = classifier(0.3, is_float64=False, **dict.fromkeys(purposes, codec))
        losses.append(own.losses(15))
        own.trainer.close()
    assert losses[0] == pytest.approx(losses[1], abs=0.2)
    return losses[1]


@slow
def test_training_with_codecs_is_equal_on_all_ranks(triple: Ranks):
    first, *others = triple(encoded)
    assert others == [first] * 2


def poisoned(layer: str) -> None:
    """Train with a NaN in the last rank's part of a layer."""
    own = classifier()
    own.losses(1)
    if own.rank == own.size - 1:
        with torch.no_grad():
            own.model.module.get_submodule(layer).weight[0, 0] = torch.nan
    own.losses(1)


@pytest.mark.parametrize("layer", ["head.0", pytest.param("head.6", marks=slow)])
def test_all_ranks_name_the_rank_and_layer_of_a_nan(pair: Ranks, layer: str):
    for failure in pair(poisoned, layer, errors=True):
        assert failure.kind == "NonFinite"
        assert f"layer {layer!r}" in failure.text
        assert "rank 1 " in failure.text


# --- language models

NUM_STEPS, MOST_TEXTS = 8, 7  # MOST_TEXTS: largest number of samples in a step
# Key biases of attention have gradients of rounding errors; a small eps would amplify them.
ADAMW = partial(torch.optim.AdamW, lr=0.02, weight_decay=0.1, eps=1e-6)
SGD = partial(torch.optim.SGD, lr=0.3, momentum=0.9)


def scheduled(optimizer: torch.optim.Optimizer) -> CosineAnnealingLR:
    return CosineAnnealingLR(optimizer, NUM_STEPS)


def samples(step: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tokens, mask and targets of a step's whole batch.

    Most targets of the first sample and all of the second sample are ignored.
    """
    source = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (count, TOKENS), generator=source)
    targets = torch.randint(VOCABULARY, (count, TOKENS), generator=source)
    targets[0, 1:] = IGNORED
    targets[1:2] = IGNORED
    targets[-1, -2:] = IGNORED
    mask = targets != IGNORED
    return tokens, mask, targets


def texts(step: int, size: int, is_masked: bool = False) -> Batch:
    # Not divisible by 2 or 3 ranks, and sometimes fewer.
    tokens, mask, targets = samples(step, MOST_TEXTS if step % 3 else 5)
    counts = [len(part) for part in tokens.tensor_split(size)]
    return {"mask": mask, "tokens": tokens} if is_masked else tokens, targets, counts


def language(
    make: Any, build: Any = Language, learning: dict[str, Any] | None = None, **more: Any
) -> Split:
    """Build a split token model; any `build` but `Language` gets keyword inputs with a mask."""
    is_masked = build is not Language

    def example(size: int) -> Any:
        tokens, mask, _ = samples(0, -(-MOST_TEXTS // size))
        return {"tokens": tokens, "mask": mask} if is_masked else tokens

    known = {"batch": partial(texts, is_masked=is_masked), "make": make}
    known["learning"] = Learning(next_token_loss, **learning or {})
    return Split(build, example, **known | more)


def largest(outputs: Tensor, targets: Tensor) -> Tensor:
    """Score the mean of the largest logits, which requires complete logits."""
    return outputs.amax((1, 2)).mean()


CASES: dict[str, dict[str, Any]] = {
    "adamw": {"make": ADAMW},
    "sgd": {"make": SGD},
    "clipped": {"make": SGD, "learning": {"clip_norm": 0.05}, "schedule": scheduled},
    "masked": {"make": ADAMW, "build": partial(Language, bias=True)},
    # A sub-batch's loss is the mean over its own tokens.
    "each_sub_batch": {"make": SGD, "updates": "sub-batch"},
}


def equal_language(case: str) -> None:
    """Compare parameters, losses and test scores with one process and the whole batch."""
    own = language(**CASES[case])
    if case == "each_sub_batch":
        compare_by_passes(own, min(own.size, -(-MOST_TEXTS // own.size)), 4)
        return
    oracle = trained_together(own, NUM_STEPS)
    if case != "masked":
        tokens, _, targets = samples(99, 11)
        own.check_tests(oracle, TensorSamples(tokens, targets), bits_per_byte, largest)
    own.compare(oracle)


@pytest.mark.parametrize("place", ["pair", pytest.param("triple", marks=slow)])
@pytest.mark.parametrize("case", CASES)
def test_language_models_match_one_process(ranks: Ranks, tmp_path, case):
    """Ignored targets are uneven: some ranks and sub-batches have almost only ignored ones."""
    ranks(equal_language, case, cwd=tmp_path)


def bfloat16() -> None:
    """Compare losses and types with one process under autocast."""
    make, learning = partial(torch.optim.AdamW, lr=0.01), {"bfloat16": True}
    own = language(make, is_float64=False, learning=learning)
    types, linear = set(), nn.functional.linear

    def spied(*args: Any) -> Tensor:
        outputs = linear(*args)
        types.add(outputs.dtype)
        return outputs

    nn.functional.linear = spied
    ours = own.losses(NUM_STEPS)
    nn.functional.linear = linear
    own.trainer.close()
    assert types == {torch.bfloat16}
    assert {one.dtype for one in own.model.module.parameters()} == {torch.float32}
    oracle = own.whole()
    optimizer = make(oracle.parameters())
    for step, found in enumerate(ours):
        tokens, targets, _ = texts(step, own.size)
        with torch.autocast("cpu", torch.bfloat16):
            loss = next_token_loss(oracle(tokens).float(), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert abs(found - float(loss)) < 5e-3
    codecs = dict.fromkeys(("activations", "activation_gradients"), "bfloat16")
    # Codecs change nothing here: messages are already in bfloat16.
    other = language(make, is_float64=False, learning=learning, **codecs)
    assert other.losses(NUM_STEPS) == ours
    other.trainer.close()


def test_bfloat16_matches_autocast(pair: Ranks):
    pair(bfloat16)
