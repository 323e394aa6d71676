"""The memory of transformers' steps as `describe` finds it, beside what PyTorch allocates."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from paceline.core.workload import Workload, replica_nbytes
from paceline.models import describe
from paceline.models.transformers import BERT, GPT, ViT
from paceline.recipes.losses import next_token_loss
from paceline.studies.profile.memory_use import make_momentum, track


def kept_nbytes(workload: Workload) -> int:
    return sum(layer.kept_nbytes or 0 for layer in workload.layers)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "gpt": (lambda: GPT(64, context=64, width=64, num_layers=3, num_heads=4), (4, 64)),
    "bert": (lambda: BERT(64, context=64, width=64, num_layers=3, num_heads=4), (4, 64)),
    "vit": (
        lambda: ViT(10, image=(3, 32, 32), patch=4, width=64, num_layers=3, num_heads=4),
        (4, 3, 32, 32),
    ),
}


def batch_of(shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randint(64, shape, generator=generator)
        if len(shape) == 2
        else torch.randn(shape, generator=generator)
    )


@pytest.mark.parametrize("case", CASES)
def test_what_is_kept_is_what_stays_allocated_after_forward(case: str) -> None:
    """Beside the output, which the caller holds and backward does not read: within one per cent."""
    make, shape = CASES[case]
    model, batch = make(), batch_of(shape)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        outputs = model(batch)
    allocated = sum(row.self_cpu_memory_usage for row in found.key_averages())
    assert kept_nbytes(describe(model, batch)) == pytest.approx(
        allocated - outputs.nbytes, rel=0.01
    )


@pytest.mark.parametrize("case", CASES)
def test_the_peak_of_a_step_is_predicted_within_a_tenth(case: str) -> None:
    make, shape = CASES[case]
    torch.manual_seed(0)
    model, batch = make(), batch_of(shape)
    targets = torch.randint(10, shape[:1] if case == "vit" else shape)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    make_momentum(model, optimizer)

    def step() -> None:
        next_token_loss(model(batch), targets).backward()
        optimizer.step()

    predicted = replica_nbytes(describe(model, batch))
    found = track(step, model, optimizer, (batch, targets))
    assert predicted == pytest.approx(found.peak_nbytes, rel=0.1)
