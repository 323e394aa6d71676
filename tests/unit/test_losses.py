"""The losses of language models, against float64."""

from math import exp, log

import pytest
import torch
from torch import Tensor

from paceline.recipes.losses import bits_per_byte, next_token_loss


def naive(logits: Tensor, targets: Tensor) -> float:
    """The mean of -log(softmax), one token after the other, in Python's float64."""
    rows = zip(logits.flatten(0, -2).tolist(), targets.flatten().tolist(), strict=True)
    losses = [
        log(sum(exp(value - row[target]) for value in row))
        for row, target in rows
        if target != -100
    ]
    return sum(losses) / len(losses)


def sample(*shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(len(shape))
    logits = 3 * torch.randn(*shape, 7, generator=generator)
    return logits, torch.randint(7, shape, generator=generator)


@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3, 4)])
def test_loss_is_the_mean_over_all_tokens(shape: tuple[int, ...]) -> None:
    logits, targets = sample(*shape)
    loss = next_token_loss(logits, targets)
    assert loss.shape == ()
    assert loss.item() == pytest.approx(naive(logits, targets), rel=1e-6)


def test_tokens_that_nobody_asks_for_do_not_count() -> None:
    logits, targets = sample(3, 4)
    targets[0] = targets[1, 1:] = -100
    logits.requires_grad_()
    loss = next_token_loss(logits, targets)
    loss.backward()
    assert loss.item() == pytest.approx(naive(logits.detach(), targets), rel=1e-6)
    assert logits.grad is not None
    assert not logits.grad[targets == -100].any()


def test_gradient_is_the_softmax_less_one_at_the_target() -> None:
    logits, targets = sample(3, 4)
    targets[2, 0] = -100
    logits.requires_grad_()
    next_token_loss(logits, targets).backward()
    exact = logits.detach().double().softmax(-1)
    exact -= torch.nn.functional.one_hot(targets.clamp(min=0), 7)
    exact[2, 0] = 0
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad.double(), exact / 11, rtol=1e-5, atol=1e-8)


def test_equal_chances_cost_the_logarithm_of_their_number() -> None:
    logits, targets = torch.zeros(2, 3, 256), torch.zeros(2, 3, dtype=torch.int64)
    assert next_token_loss(logits, targets).item() == pytest.approx(log(256), rel=1e-6)
    assert bits_per_byte(logits, targets).item() == pytest.approx(8, rel=1e-6)


def test_bits_per_byte_are_the_loss_in_another_unit() -> None:
    logits, targets = sample(3, 4)
    assert bits_per_byte(logits, targets).item() == pytest.approx(
        naive(logits, targets) / log(2), rel=1e-6
    )


@pytest.mark.parametrize("shape", [(0, 4), (2, 3)])
def test_without_any_target_the_loss_is_zero_and_moves_nothing(shape: tuple[int, ...]) -> None:
    """A worker without samples in a step adds its gradients to the others'."""
    logits = torch.randn(*shape, 7, requires_grad=True)
    loss = next_token_loss(logits, torch.full(shape, -100))
    loss.backward()
    assert loss.item() == 0
    assert logits.grad is not None
    assert not logits.grad.any()
