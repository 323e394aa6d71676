"""Gradients that accumulate before they are exchanged, and gradients that people keep."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from unused import Experts

from trial import Trial, gradients, kept, mlp, program, sgd, squares, trained


@program
def no_sync_in_all_micro_batches_but_the_last(trial: Trial) -> Iterator[Any]:
    model = trial.wrap(mlp())
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        for micro in range(3):
            with model.no_sync() if micro < 2 else nullcontext():
                loss = model(trial.batch(10 * step + micro)).square().mean() / 3
                loss.backward()
            yield [loss, gradients(model)]
        optimizer.step()


@program
def no_sync_from_the_very_first_step(trial: Trial) -> Iterator[Any]:
    """Gradients that were there before anything was ever exchanged."""
    model = trial.wrap(mlp(6, 8, 8, 3))
    with model.no_sync():
        for micro in range(4):
            model(trial.batch(micro)).square().mean().backward()
            yield micro
    yield from trained(model, squares(trial))


@program
def no_sync_around_backward_only(trial: Trial) -> Iterator[Any]:
    """The forward pass outside: DDP exchanges all the same, as its documentation warns."""
    model = trial.wrap(mlp())
    for step in range(3):
        model.zero_grad()
        loss = model(trial.batch(step)).square().mean()
        with model.no_sync():
            loss.backward()
        yield gradients(model)


@program
def no_sync_around_forward_only(trial: Trial) -> Iterator[Any]:
    model = trial.wrap(mlp())
    for step in range(3):
        model.zero_grad()
        with model.no_sync():
            loss = model(trial.batch(step)).square().mean()
        loss.backward()
        yield gradients(model)


@program
def no_sync_ended_by_an_error(trial: Trial) -> Iterator[Any]:
    model = trial.wrap(mlp())
    try:
        with model.no_sync():
            model(trial.batch(0)).square().mean().backward()
            raise KeyError("stopped")
    except KeyError:
        yield gradients(model)
    yield from trained(model, squares(trial))


@program
def no_sync_within_no_sync(trial: Trial) -> Iterator[Any]:
    model = trial.wrap(mlp())
    with model.no_sync():
        with model.no_sync():
            model(trial.batch(0)).sum().backward()
        model(trial.batch(1)).sum().backward()
        yield "alone"
    model(trial.batch(2)).sum().backward()
    yield "together"


@program
def flag_instead_of_no_sync(trial: Trial) -> Iterator[Any]:
    """`require_backward_grad_sync`, which many training loops set by hand."""
    model = trial.wrap(mlp())
    optimizer = sgd(model)
    for step in range(6):
        model.require_backward_grad_sync = step % 3 == 2
        loss = model(trial.batch(step)).square().mean()
        loss.backward()
        yield [loss, gradients(model)]
        if model.require_backward_grad_sync:
            optimizer.step()
            optimizer.zero_grad()


@program
def flag_set_before_backward(trial: Trial) -> Iterator[Any]:
    """nanoGPT sets it before forward; others between forward and backward."""
    model = trial.wrap(mlp())
    optimizer = sgd(model)
    for step in range(4):
        loss = model(trial.batch(step)).square().mean()
        model.require_backward_grad_sync = step % 2 == 1
        loss.backward()
        yield [loss, gradients(model)]
        if model.require_backward_grad_sync:
            optimizer.step()
            optimizer.zero_grad()


@program
def parameters_that_only_earlier_micro_batches_touch(trial: Trial) -> Iterator[Any]:
    """What only micro-batches in no_sync touched is as DDP leaves it in the exchange."""
    model = trial.wrap(Experts(4), find_unused_parameters=True)
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        with model.no_sync():
            model(trial.batch(step), [1]).square().mean().backward()
            model(trial.batch(10 + step), [2 + trial.rank]).square().mean().backward()
            yield gradients(model)
        model(trial.batch(20 + step), [0]).square().mean().backward()
        yield gradients(model)
        optimizer.step()


@program
def parameters_touched_alone_and_never_exchanged_before(trial: Trial) -> Iterator[Any]:
    """Rank 1 alone touches an expert in no_sync, and nobody in the step that exchanges."""
    model = trial.wrap(Experts(3), find_unused_parameters=True)
    for step in range(3):
        model.zero_grad(set_to_none=step != 2)
        with model.no_sync():
            model(trial.batch(step), [trial.rank]).square().mean().backward()
        model(trial.batch(10 + step), [0]).square().mean().backward()
        yield gradients(model)


@program
def accumulation_without_no_sync(trial: Trial) -> Iterator[Any]:
    """Each micro-batch is exchanged, with what is there already."""
    model = trial.wrap(mlp())
    optimizer = sgd(model)
    for step in range(4):
        model(trial.batch(step)).square().mean().backward()
        yield gradients(model)
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()


@program
def accumulation_over_gradients_that_are_views(trial: Trial) -> Iterator[Any]:
    model = trial.wrap(mlp(), gradient_as_bucket_view=True)
    optimizer = sgd(model)
    for step in range(6):
        with model.no_sync() if step % 3 < 2 else nullcontext():
            model(trial.batch(step)).square().mean().backward()
        yield gradients(model)
        if step % 3 == 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step > 3)


@program
def gradients_zeroed_in_place(trial: Trial) -> Iterator[Any]:
    model = trial.wrap(mlp())
    optimizer = sgd(model)
    for step in range(4):
        optimizer.zero_grad(set_to_none=False)
        model(trial.batch(step)).square().mean().backward()
        yield step
        optimizer.step()


@program
def gradients_zeroed_in_place_while_an_expert_rests(trial: Trial) -> Iterator[Any]:
    """Zeros are no None: momentum and decay move what rests, on all ranks."""
    model = trial.wrap(Experts(3), find_unused_parameters=True)
    optimizer = sgd(model)
    for step, chosen in enumerate([[0, 1], [0], [0], [1], [2]]):
        optimizer.zero_grad(set_to_none=False)
        model(trial.batch(step), chosen).square().mean().backward()
        yield step
        optimizer.step()


@program
def gradients_kept_over_steps(trial: Trial) -> Iterator[Any]:
    """References without a copy: earlier steps' gradients keep their values."""
    model = trial.wrap(mlp(6, 8, 8, 3))
    optimizer = sgd(model)
    held: list[list[torch.Tensor]] = []
    for step in range(4):
        optimizer.zero_grad()
        model(trial.batch(step)).square().mean().backward()
        held.append([parameter.grad for parameter in model.parameters()])
        yield kept(held)
        optimizer.step()


@program
def gradients_kept_and_put_back(trial: Trial) -> Iterator[Any]:
    """Gradient surgery: two tasks' gradients are taken apart, and written back by the user."""
    model = trial.wrap(mlp())
    optimizer = sgd(model)
    for step in range(3):
        parts = []
        for task in range(2):
            optimizer.zero_grad()
            model(trial.batch(10 * step + task)).select(1, task).square().mean().backward()
            parts.append([parameter.grad for parameter in model.parameters()])
        for parameter, one, other in zip(model.parameters(), *parts, strict=True):
            product = (one * other).sum()
            parameter.grad = one + other if product > 0 else one - other
        yield kept(parts)
        optimizer.step()


@program
def gradients_that_the_user_replaces(trial: Trial) -> Iterator[Any]:
    """.grad is set to the user's own tensor, to which the next backward pass adds."""
    model = trial.wrap(mlp())
    for step in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
        held = [parameter.grad for parameter in model.parameters()]
        model(trial.batch(step)).square().mean().backward()
        same = [p.grad is one for p, one in zip(model.parameters(), held, strict=True)]
        yield [same, gradients(model)]


@program
def gradients_deleted_by_some_ranks_only(trial: Trial) -> Iterator[Any]:
    """One rank zeroes in place, the other sets None: the means are the same."""
    model = trial.wrap(mlp())
    for step in range(3):
        model.zero_grad(set_to_none=trial.rank == 0)
        model(trial.batch(step)).square().mean().backward()
        yield step


@program
def gradients_in_small_buckets(trial: Trial) -> Iterator[Any]:
    """Many buckets or one: the same gradients."""
    model = trial.wrap(mlp(6, 64, 64, 64, 3), bucket_cap_mb=0.01)
    yield from trained(model, squares(trial), steps=4)


@program
def weights_tied_by_the_user_in_two_modules(trial: Trial) -> Iterator[Any]:
    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    module[4].weight = module[0].weight
    yield from trained(trial.wrap(module), squares(trial), steps=4)


@program
def gradients_in_one_flat_buffer(trial: Trial) -> Iterator[Any]:
    """.grad are the user's views of one tensor, which must hold what was exchanged."""
    model = trial.wrap(mlp(6, 8, 8, 3))
    flat = torch.zeros(sum(parameter.numel() for parameter in model.parameters()))
    at = 0
    for parameter in model.parameters():
        parameter.grad = flat[at : at + parameter.numel()].view_as(parameter)
        at += parameter.numel()
    for step in range(4):
        flat.zero_()
        model(trial.batch(step)).square().mean().backward()
        yield flat
        with torch.no_grad():
            vector = nn.utils.parameters_to_vector(model.parameters()) - 0.1 * flat
            nn.utils.vector_to_parameters(vector, model.parameters())


@program
def parameters_in_shared_memory(trial: Trial) -> Iterator[Any]:
    module = mlp()
    module.share_memory()
    yield from trained(trial.wrap(module), squares(trial))
