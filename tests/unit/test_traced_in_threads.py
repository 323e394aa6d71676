"""Traces of several threads at once, beside a thread that computes: none disturbs another."""

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from paceline.strategies.wheel.graph import traced

NUM_THREADS, NUM_TRACES = 3, 30


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    def forward(self, rows: Tensor) -> Tensor:
        return self.inner(rows) + torch.zeros(rows.shape[0], 1)


@pytest.fixture(autouse=True)
def switching() -> Iterator[None]:
    """Have threads take turns a thousand times as often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(before)


def graph() -> list[str]:
    model = Nested()
    return [str(node) for node in traced(model, torch.ones(2, 4), model.inner[2])]


def test_threads_that_trace_at_once_each_have_their_own_graph() -> None:
    expected = graph()
    own_call, own_zeros = nn.Module.__call__, torch.zeros
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        found = list(pool.map(lambda _: graph(), range(NUM_THREADS * NUM_TRACES)))
    assert found == [expected] * len(found)
    assert nn.Module.__call__ is own_call
    assert torch.zeros is own_zeros


def test_a_thread_computes_while_another_traces() -> None:
    model, rows, ended = Nested(), torch.ones(2, 4), threading.Event()
    expected = model(rows)

    def compute() -> int:
        times = 0
        while not ended.is_set():
            assert torch.equal(model(rows), expected)
            times += 1
        return times

    with ThreadPoolExecutor(1) as pool:
        computing = pool.submit(compute)
        try:
            alone = graph()
            graphs = [graph() for _ in range(NUM_TRACES)]
        finally:
            ended.set()
        assert computing.result() > 0
    assert graphs == [alone] * NUM_TRACES
