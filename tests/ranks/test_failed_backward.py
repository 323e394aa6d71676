"""A backward pass fails on some ranks, and training continues."""

from contextlib import suppress
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.core.errors import StepDiscarded
from pair import Failure
from replicas import (
    PLACES,
    Net,
    batch,
    build,
    check,
    each_place,
    mean,
    parallel_of,
    sgd,
    square,
    train,
)


class OwnError(Exception):
    """An error of the user's model."""


class _Raise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        raise OwnError


class Fragile(Net):
    """A net that raises in backward at each "!" of `order`."""

    def forward(self, x: Tensor, order: str = "abc") -> Tensor:
        for name in order:
            x = _Raise.apply(x) if name == "!" else torch.tanh(getattr(self, name)(x))
        return x


def continues(exchange: str, fails: list[tuple[int, int]], where: str) -> list[tuple[int, str]]:
    """Train with failures at each (rank, step); return the skipped steps with their errors."""
    module, oracle = build(Fragile)
    parallel = parallel_of(module, exchange, deadline_s=2.0)
    optimizers, caught = (sgd(parallel), sgd(oracle)), []
    orders = dict.fromkeys(fails, where)
    for step in range(6):
        for optimizer in optimizers:
            optimizer.zero_grad()
        order = orders.get((dist.get_rank(), step), "abc")
        inputs = batch(dist.get_rank(), step).requires_grad_()
        try:
            parallel(inputs, order).square().mean().backward()
        except (OwnError, StepDiscarded) as error:
            caught.append((step, type(error).__name__))
            if isinstance(error, StepDiscarded):  # else the optimizer would use this rank's alone
                assert all(one.grad is None for one in module.parameters())
            continue
        mean(square, oracle, step).backward()
        for optimizer in optimizers:
            optimizer.step()
    check(parallel, oracle)
    return caught


FAILURES = {
    "in the middle": ([(1, 2)], "ab!c"),
    "before any gradient": ([(1, 2)], "abc!"),
    "after all gradients": ([(1, 2)], "!abc"),
    "in the first step": ([(1, 0)], "ab!c"),
    "in the first step, on rank 0": ([(0, 0)], "ab!c"),
    "on all ranks": ([(0, 2), (1, 2)], "ab!c"),
    "on all ranks in the first step": ([(0, 0), (1, 0)], "ab!c"),
    "by turns": ([(1, 1), (0, 2), (1, 3), (0, 4)], "ab!c"),
    "twice on one rank": ([(0, 2), (0, 3)], "ab!c"),
}


def failures_of_each_place() -> list[object]:
    """Return each failure for each exchange and place; most are marked slow."""
    return [
        pytest.param(*place, name, marks=[] if is_quick else pytest.mark.slow)
        for place in PLACES
        for name in FAILURES
        for is_quick in [name == "in the middle" or place in PLACES[1:3]]
    ]


@pytest.mark.parametrize(("exchange", "place", "name"), failures_of_each_place())
def test_a_failed_step_is_skipped_on_all_ranks_or_refused(ranks, exchange, name):
    """`tree` can discard only the first step; DDP requires all backward passes to finish."""
    fails, where = FAILURES[name]
    found = ranks(continues, exchange, fails, where, timeout_s=4.0, errors=True)
    if exchange == "allreduce" or (exchange == "tree" and max(step for _, step in fails) > 0):
        refused = [one for one in found if isinstance(one, Failure)]
        kind, field = ("InvalidInput", "exchange") if exchange == "tree" else ("RuntimeError", None)
        assert any(kind in one.kinds and one.fields.get("field") == field for one in refused)
        return
    failing = dict.fromkeys(fails, "OwnError")
    steps = sorted({step for _, step in fails})
    caught = [
        [(step, failing.get((rank, step), "StepDiscarded")) for step in steps] for rank in (0, 1)
    ]
    assert found == caught


class Sparse(nn.Embedding):
    """An embedding with sparse gradients, whose backward can fail."""

    def forward(self, words: Tensor, fails: bool) -> Tensor:
        return _Raise.apply(super().forward(words)) if fails else super().forward(words)


def fails_with_sparse_gradients(exchange: str) -> None:
    """Fail on rank 1 in step 1."""
    module, _ = build(partial(Sparse, 20, 6, sparse=True))
    parallel = parallel_of(module, exchange, deadline_s=2.0)
    for step in range(3):
        with suppress(OwnError):
            fails = (dist.get_rank(), step) == (1, 1)
            parallel(torch.arange(4), fails).square().mean().backward()


@pytest.mark.parametrize("exchange", ["host", "tree"])
def test_a_failed_step_with_only_sparse_gradients_is_refused(pair, exchange):
    _, failure = pair(fails_with_sparse_gradients, exchange, timeout_s=4.0, errors=True)
    assert isinstance(failure, Failure)
    assert failure.fields.get("field") == "exchange"


def fails_in_no_sync(exchange: str) -> str:
    """Fail in `no_sync`, where the user zeroes the partial gradients."""
    module, _ = build(Fragile)
    parallel = parallel_of(module, exchange, deadline_s=2.0)
    optimizer = sgd(parallel)
    for step in range(3):
        optimizer.zero_grad()
        with parallel.no_sync():
            order = "ab!c" if (dist.get_rank(), step) == (1, 1) else "abc"
            try:
                parallel(batch(dist.get_rank(), 50 + step), order).square().mean().backward()
            except OwnError:
                parallel.zero_grad()
        parallel(batch(dist.get_rank(), step)).square().mean().backward()
        optimizer.step()
    return check(parallel, parallel)


def fails_in_forward(exchange: str) -> str:
    """Fail once in forward on one rank, and repeat it; the failure has no effect."""
    module, oracle = build(Net)
    parallel = parallel_of(module, exchange)
    for step in range(4):
        if (dist.get_rank(), step) == (1, 2):
            with pytest.raises(RuntimeError, match="shape"):
                parallel(batch(dist.get_rank(), step, 4, 5))
        train(parallel, oracle, [step])
    return check(parallel, oracle)


@each_place
@pytest.mark.parametrize("program", [fails_in_no_sync, fails_in_forward])
def test_a_program_does_what_one_process_does(ranks, program, exchange):
    ranks(program, exchange)
