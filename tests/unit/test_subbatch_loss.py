"""Cross entropy on logits of which no rank has all columns, against torch on the whole."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from paceline.strategies.subbatch.layers import Sharding
from paceline.strategies.subbatch.loss import CrossEntropy, loss_terms

SCALE = 0.125


def parted(
    logits: torch.Tensor, targets: torch.Tensor, ranks: int
) -> tuple[CrossEntropy, torch.Tensor]:
    """The loss, and all derivatives, as ranks of which each has some columns find them."""
    sharding = Sharding.even(logits.shape[1], ranks)
    shards = [sharding.shard(rank) for rank in range(ranks)]
    own = list(logits.split(sharding.sizes, 1))
    terms = [loss_terms(one, targets, shard) for one, shard in zip(own, shards, strict=True)]
    loss = CrossEntropy.of(torch.stack(terms), targets)
    parts = [loss.gradients(one, targets, at, SCALE) for one, at in zip(own, shards, strict=True)]
    return loss, torch.cat(parts, 1)


@given(
    st.integers(0, 7), st.integers(4, 13), st.integers(1, 4), st.integers(0, 2**20), st.floats(0, 1)
)
def test_loss_and_derivatives_are_torchs(
    rows: int, classes: int, ranks: int, seed: int, ignored: float
):
    source = torch.Generator().manual_seed(seed)
    logits = 5 * torch.randn(rows, classes, generator=source, dtype=torch.float64)
    targets = torch.randint(classes, (rows,), generator=source)
    targets[torch.rand(rows, generator=source) < ignored] = -100
    loss, gradients = parted(logits, targets, ranks)
    whole = logits.clone().requires_grad_()
    expected = cross_entropy(whole, targets, reduction="none")
    (SCALE * expected.sum()).backward()
    torch.testing.assert_close(loss.losses, expected.detach(), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(gradients, whole.grad, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("ranks", [1, 3])
def test_logits_that_exp_cannot_hold_have_a_loss(ranks: int):
    logits = torch.tensor([[1e4, -1e4, 0.0], [-2e4, -2e4, -2e4]])
    targets = torch.tensor([1, 2])
    loss, gradients = parted(logits, targets, ranks)
    torch.testing.assert_close(loss.losses, cross_entropy(logits, targets, reduction="none"))
    assert gradients.isfinite().all()
