"""A language model with its head split by vocabulary, compared with one process."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from language_nets import MOST, Language, count_of, samples
from paceline.exchange.step import Learning
from paceline.training.data.dataset import TensorSamples
from paceline.training.recipes.losses import bits_per_byte, next_token_loss
from pair import Ranks
from split_heads import Batch, Split, compare_by_passes, trained_together

slow = pytest.mark.slow
NUM_STEPS = 8
# Key biases of attention have gradients of rounding errors; a small eps would amplify them.
ADAMW = partial(torch.optim.AdamW, lr=0.02, weight_decay=0.1, eps=1e-6)
SGD = partial(torch.optim.SGD, lr=0.3, momentum=0.9)


def scheduled(optimizer: torch.optim.Optimizer) -> CosineAnnealingLR:
    return CosineAnnealingLR(optimizer, NUM_STEPS)


def batch(step: int, size: int, is_masked: bool = False) -> Batch:
    tokens, mask, targets = samples(step, count_of(step))
    counts = [len(part) for part in tokens.tensor_split(size)]
    return {"mask": mask, "tokens": tokens} if is_masked else tokens, targets, counts


def split(
    make: Any, build: Any = Language, learning: dict[str, Any] | None = None, **more: Any
) -> Split:
    """Build a split token model; any `build` but `Language` gets keyword inputs with a mask."""
    is_masked = build is not Language

    def example(size: int) -> Any:
        tokens, mask, _ = samples(0, -(-MOST // size))
        return {"tokens": tokens, "mask": mask} if is_masked else tokens

    known = {"batch": partial(batch, is_masked=is_masked), "make": make}
    known["learning"] = Learning(next_token_loss, **learning or {})
    return Split(build, example, **known | more)


def largest(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
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


def equal(case: str) -> None:
    """Compare parameters, losses and test scores with one process and the whole batch."""
    own = split(**CASES[case])
    if case == "each_sub_batch":
        compare_by_passes(own, min(own.size, -(-MOST // own.size)), 4)
        return
    oracle = trained_together(own, NUM_STEPS)
    if case != "masked":
        tokens, _, targets = samples(99, 11)
        own.check_tests(oracle, TensorSamples(tokens, targets), bits_per_byte, largest)
    own.compare(oracle)


@pytest.mark.parametrize("place", ["pair", pytest.param("triple", marks=slow)])
@pytest.mark.parametrize("case", CASES)
def test_steps_match_one_process_with_the_whole_batch(ranks: Ranks, tmp_path, case):
    """Ignored targets are uneven: some ranks and sub-batches have almost only ignored ones."""
    ranks(equal, case, cwd=tmp_path)


def bfloat16() -> None:
    """Compare losses and types with one process under autocast."""
    make, learning = partial(torch.optim.AdamW, lr=0.01), {"bfloat16": True}
    own = split(make, is_float64=False, learning=learning)
    types, linear = set(), nn.functional.linear

    def spied(*args: Any) -> torch.Tensor:
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
        tokens, targets, _ = batch(step, own.size)
        with torch.autocast("cpu", torch.bfloat16):
            loss = next_token_loss(oracle(tokens).float(), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert abs(found - float(loss)) < 5e-3
    codecs = dict.fromkeys(("activations", "activation_gradients"), "bfloat16")
    # Codecs change nothing here: messages are already in bfloat16.
    other = split(make, is_float64=False, learning=learning, **codecs)
    assert other.losses(NUM_STEPS) == ours
    other.trainer.close()


def test_bfloat16_matches_autocast(pair: Ranks):
    pair(bfloat16)
