"""Cases in which a backward pass fails on some rank, and the user catches the error and goes on."""

from collections.abc import Callable

import torch
from graphs import Net
from torch import Tensor, nn

from paceline.core.errors import StepDiscarded
from ranks import Place, batch, case, quick, settled, sgd

Fails = Callable[[int, int], bool]  # whether the pass of (rank, step) fails


class Failure(Exception):
    """The user's own error."""


class _Raise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        raise Failure


class Fragile(Net):
    """A net whose backward pass fails where its order says "!"."""

    def forward(self, x: Tensor, order: str = "abc") -> Tensor:
        for name in order:
            x = _Raise.apply(x) if name == "!" else torch.tanh(getattr(self, name)(x))
        return x


def _go_on(place: Place, fails: Fails, where: str = "ab!c", steps: int = 6):
    module, oracle = place.build(Fragile)
    parallel = place.parallel(module)
    optimizers = sgd(parallel), sgd(oracle)
    caught = []

    def loss(model: nn.Module, rank: int, step: int, order: str) -> Tensor:
        return model(batch(rank, step).requires_grad_(), order).square().mean()

    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        order = where if fails(place.rank, step) else "abc"
        try:
            loss(parallel, place.rank, step, order).backward()
        except (Failure, StepDiscarded) as error:
            caught.append([step, type(error).__name__])
            continue
        place.mean(lambda m, r, s: loss(m, r, s, "abc"), oracle, step).backward()
        for optimizer in optimizers:
            optimizer.step()
    return settled(parallel, oracle, caught=caught)


@quick
def failure_in_the_middle(place: Place):
    return _go_on(place, lambda rank, step: rank == 1 and step == 2)


@quick
def failure_before_any_gradient(place: Place):
    return _go_on(place, lambda rank, step: rank == 1 and step == 2, "abc!")


@quick
def failure_after_all_gradients(place: Place):
    return _go_on(place, lambda rank, step: rank == 1 and step == 2, "!abc")


@quick
def failure_in_the_first_step(place: Place):
    return _go_on(place, lambda rank, step: rank == 1 and step == 0)


@quick
def failure_in_the_first_step_on_rank_0(place: Place):
    return _go_on(place, lambda rank, step: rank == 0 and step == 0)


@quick
def failure_on_all_ranks(place: Place):
    return _go_on(place, lambda rank, step: step == 2)


@quick
def failure_on_all_ranks_in_the_first_step(place: Place):
    return _go_on(place, lambda rank, step: step == 0)


@quick
def failures_by_turns(place: Place):
    return _go_on(place, lambda rank, step: step in (1, 2, 3, 4) and rank == step % 2)


@quick
def failures_one_after_another_on_one_rank(place: Place):
    return _go_on(place, lambda rank, step: rank == 0 and step in (2, 3))


@quick
def failure_in_no_sync(place: Place):
    """What was accumulated before is kept, and the user decides."""
    module, oracle = place.build(Fragile)
    parallel = place.parallel(module)
    optimizers = sgd(parallel), sgd(oracle)
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        order = "ab!c" if place.rank == 1 and step == 1 else "abc"
        with parallel.no_sync():
            try:
                parallel(batch(place.rank, 50 + step), order).square().mean().backward()
            except Failure:
                parallel.zero_grad()
        parallel(batch(place.rank, step)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    return settled(parallel, parallel)


@case
def failure_in_forward(place: Place):
    """A forward pass that fails on one rank and is done again leaves nothing behind."""
    module, oracle = place.build(Net)
    parallel = place.parallel(module)
    optimizers = sgd(parallel), sgd(oracle)
    failed = 0
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        if place.rank == 1 and step == 2:
            try:
                parallel(batch(place.rank, step, 4, 5))
            except RuntimeError:
                failed += 1
        parallel(batch(place.rank, step)).square().mean().backward()
        place.mean(lambda m, r, s: m(batch(r, s)).square().mean(), oracle, step).backward()
        for optimizer in optimizers:
            optimizer.step()
    return settled(parallel, oracle, failed=failed)
