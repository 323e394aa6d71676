"""Gradients accumulated before an exchange, and gradients that users keep or replace."""

from collections.abc import Iterator
from typing import Any

import torch
from declared import plain, programs, trains
from torch import nn
from unused import Experts

from steps import alone, backward, learn, mlp, squares, stepped, trained, zeroed
from trial import Run, Trial, gradients, kept


def no_sync_in_all_micro_batches_but_the_last(trial, model):
    for step in stepped(model, 3):
        for micro in range(2):
            yield alone(trial, model, 10 * step + micro)
        yield learn(trial, model, 10 * step + 2)


@trains(lambda: mlp(6, 8, 8, 3))
def no_sync_from_the_very_first_step(trial, model):
    """Accumulate gradients before the first exchange."""
    for micro in range(4):
        yield alone(trial, model, micro)
    yield from trained(model, squares(trial))


def no_sync_around_backward_only(trial, model):
    """Run forward outside no_sync: DDP still exchanges, as its documentation warns."""
    for step in zeroed(model, 3):
        loss = model(trial.batch(step)).square().mean()
        with model.no_sync():
            loss.backward()
        yield gradients(model)


def no_sync_around_forward_only(trial, model):
    for step in zeroed(model, 3):
        with model.no_sync():
            loss = model(trial.batch(step)).square().mean()
        yield backward(loss)


def no_sync_ended_by_an_error(trial, model):
    try:
        with model.no_sync():
            learn(trial, model, 0)
            raise KeyError("stopped")
    except KeyError:
        yield gradients(model)
    yield from trained(model, squares(trial))


def no_sync_within_no_sync(trial, model):
    with model.no_sync():
        with model.no_sync():
            model(trial.batch(0)).sum().backward()
        yield backward(model(trial.batch(1)).sum())
    yield backward(model(trial.batch(2)).sum())


def _flagged(every: int, is_early: bool) -> Run:
    """Set `require_backward_grad_sync` by hand: before forward, as in nanoGPT, or after it."""

    def run(trial: Trial) -> Iterator[Any]:
        model = trial.wrap(mlp())
        for step in stepped(model, 6, every=every):
            is_last = step % every == every - 1
            if is_early:
                model.require_backward_grad_sync = is_last
            loss = squares(trial)(model, step)
            model.require_backward_grad_sync = is_last
            yield backward(loss)

    return run


@trains(lambda: Experts(4), find_unused_parameters=True)
def parameters_that_only_earlier_micro_batches_touch(trial, model):
    """Parameters used only in no_sync have DDP's gradients after the exchange."""
    for step in stepped(model, 3):
        with model.no_sync():
            model(trial.batch(step), [1]).square().mean().backward()
            yield backward(model(trial.batch(10 + step), [2 + trial.rank]).square().mean())
        yield backward(model(trial.batch(20 + step), [0]).square().mean())


@trains(lambda: Experts(3), find_unused_parameters=True)
def parameters_touched_alone_and_never_exchanged_before(trial, model):
    """Only rank 1 uses expert 1, in no_sync; no rank uses it in the exchanged pass."""
    for step in range(3):
        model.zero_grad(set_to_none=step != 2)
        with model.no_sync():
            model(trial.batch(step), [trial.rank]).square().mean().backward()
        yield backward(model(trial.batch(10 + step), [0]).square().mean())


@trains(mlp, gradient_as_bucket_view=True)
def accumulation_over_gradients_that_are_views(trial, model):
    for step in stepped(model, 9, lambda step: step > 5, every=3):
        yield (alone if step % 3 < 2 else learn)(trial, model, step)


def _tied() -> nn.Module:
    module = mlp(6, 6, 6, 6)
    module[4].weight = module[0].weight
    return module


@trains(lambda: Experts(3), find_unused_parameters=True)
def gradients_zeroed_in_place_while_an_expert_rests(trial, model):
    """Zero gradients, unlike None, let momentum and decay move an unused expert."""
    for step, chosen in stepped(model, enumerate([[0, 1], [0], [0], [1], [2]]), lambda _: False):
        yield backward(model(trial.batch(step), chosen).square().mean())


@trains(lambda: mlp(6, 8, 8, 3))
def gradients_kept_over_steps(trial, model):
    """Keep references to the gradients of earlier steps, whose values must not change."""
    held: list[list[torch.Tensor]] = []
    for step in stepped(model, 4):
        learn(trial, model, step)
        held.append([parameter.grad for parameter in model.parameters()])
        yield kept(held)


def gradients_kept_and_put_back(trial, model):
    """Gradient surgery: combine two tasks' gradients by hand and write them to .grad."""
    for step in stepped(model, 3):
        parts = []
        for task in range(2):
            model.zero_grad()
            model(trial.batch(10 * step + task)).select(1, task).square().mean().backward()
            parts.append([parameter.grad for parameter in model.parameters()])
        for parameter, one, other in zip(model.parameters(), *parts, strict=True):
            product = (one * other).sum()
            parameter.grad = one + other if product > 0 else one - other
        yield kept(parts)


def gradients_that_the_user_replaces(trial, model):
    """Set .grad to a user's tensor, to which the next backward pass adds."""
    for step in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
        held = [parameter.grad for parameter in model.parameters()]
        learn(trial, model, step)
        same = [p.grad is one for p, one in zip(model.parameters(), held, strict=True)]
        yield [same, gradients(model)]


def gradients_deleted_by_some_ranks_only(trial, model):
    """Rank 0 sets gradients to None, and rank 1 zeroes them in place."""
    for step in range(3):
        model.zero_grad(set_to_none=trial.rank == 0)
        yield learn(trial, model, step)


@trains(lambda: mlp(6, 8, 8, 3))
def gradients_in_one_flat_buffer(trial, model):
    """Make each .grad a view of one flat tensor, which must receive the exchanged gradients."""
    flat = torch.zeros(sum(parameter.numel() for parameter in model.parameters()))
    at = 0
    for parameter in model.parameters():
        parameter.grad = flat[at : at + parameter.numel()].view_as(parameter)
        at += parameter.numel()
    for step in range(4):
        flat.zero_()
        learn(trial, model, step)
        yield flat
        with torch.no_grad():
            vector = nn.utils.parameters_to_vector(model.parameters()) - 0.1 * flat
            nn.utils.vector_to_parameters(vector, model.parameters())


programs(
    __name__,
    {
        "flag_instead_of_no_sync": _flagged(3, is_early=True),
        "flag_set_before_backward": _flagged(2, is_early=False),
        # Each micro-batch is exchanged, together with the gradients accumulated so far.
        "accumulation_without_no_sync": plain(mlp, steps=4, every=2),
        "gradients_zeroed_in_place": plain(mlp, steps=4, set_to_none=lambda _: False),
        # Many buckets or one: the same gradients.
        "gradients_in_small_buckets": plain(
            lambda: mlp(6, 64, 64, 64, 3), steps=4, bucket_cap_mb=0.01
        ),
        "weights_tied_by_the_user_in_two_modules": plain(_tied, steps=4),
        "parameters_in_shared_memory": plain(lambda: mlp().share_memory()),
    },
)
