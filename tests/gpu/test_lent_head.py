"""A head of strategy wheel on a GPU, whose parameters are there only while it answers."""

import copy

import pytest
import torch
from torch import nn

from paceline.strategies.wheel.lent import LentHead

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


def test_the_gpu_has_the_parameters_of_an_answer_and_nothing_afterwards() -> None:
    device = torch.device("cuda")
    kept = nn.Sequential(nn.Linear(512, 512), nn.BatchNorm1d(512), nn.Linear(512, 10))
    own = copy.deepcopy(kept)
    lent = LentHead(own, own, kept, device)
    inputs = torch.randn(64, 512)
    before = None  # the first product allocates a workspace of cuBLAS, which stays
    for _ in range(3):
        lent.fill()
        lent.head(inputs.to(device)).sum().backward()
        found = lent.done([one.grad for one in lent.parameters if one.grad is not None])
        whole = sum(one.nbytes for one in kept.parameters())
        filled = torch.cuda.memory_allocated()
        lent.empty()
        before = torch.cuda.memory_allocated() if before is None else before
        assert torch.cuda.memory_allocated() == before
        assert filled - before >= 2 * whole
    kept(inputs).sum().backward()
    expected = [one.grad for one in kept.parameters()]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
