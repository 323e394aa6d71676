"""Optimizers of a model take a step with NaN gradients together or not at all."""

from functools import partial

import pytest
import torch
from torch import nn

from codec_training import momentum, state
from paceline.core.errors import NonFinite
from paceline.exchange.optimizers import NonFiniteGuard

POISONED, NUM_STEPS = 2, 4


def gradients(layers: list[nn.Module], poisoned: list[int]) -> float:
    """Set all gradients, as a backward pass with an exchange does; return a loss."""
    for number, layer in enumerate(layers):
        for parameter in layer.parameters():
            parameter.grad = torch.full_like(parameter, torch.nan if number in poisoned else 1.0)
    return 0.5


@pytest.mark.parametrize("poisoned", [[0], [0, 1]])
@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
@pytest.mark.parametrize("way", ["raise", "skip", "closure", "scaler", "fused scaler"])
def test_no_optimizer_takes_a_poisoned_step(way: str, poisoned: list[int], order: list[int]):
    """`order`: of the optimizers' steps; each optimizer has one layer."""
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    optimizers = [momentum(layer, fused=way == "fused scaler") for layer in layers]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled="scaler" in way)
    guard, raised = NonFiniteGuard("skip" if way == "skip" else "raise"), []
    guard.watch(parameter for layer in layers for parameter in layer.parameters())
    for step in range(NUM_STEPS):
        is_poisoned = step == POISONED
        scaler.scale(torch.ones(()))
        computed = partial(gradients, layers, poisoned if is_poisoned else [])
        computed()
        guard.found(is_poisoned)
        for number in order:
            before = state(layers[number], optimizers[number])
            try:
                if way == "closure":
                    assert optimizers[number].step(computed) == 0.5
                else:
                    scaler.step(optimizers[number])
            except NonFinite:
                raised.append((step, number))
            assert (before == state(layers[number], optimizers[number])) == is_poisoned
        scaler.update()
    raises = way in ("raise", "closure")
    assert raised == [(POISONED, number) for number in order if raises and number in poisoned]
    assert guard.num_skipped == (way == "skip")
    assert scaler.get_scale() == (512.0 if scaler.is_enabled() else 1.0)
    guard.close()
