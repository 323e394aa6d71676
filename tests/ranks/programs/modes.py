"""Modules that are evaluated, copied or saved before training, and training in eval mode."""

import copy

import torch
from declared import trains
from torch.utils.checkpoint import checkpoint

from steps import backward, normed, sgd, squares, stepped, trained
from trial import gradients, state_of


@trains(normed)
def evaluated_before_the_first_step(trial, model):
    """All ranks have rank 0's values from the construction on."""
    yield trial.evaluated(model, 30)
    yield from trained(model, squares(trial))
    yield trial.evaluated(model, 30)


def evaluated_with_gradients_on_before_training(trial):
    """Validate without no_grad, and keep graphs that never run backward."""
    model = trial.wrap(normed()).eval()
    outputs = [model(trial.batch(30 + step)) for step in range(3)]
    yield outputs
    model.train()
    yield from trained(model, squares(trial))
    yield outputs


def wrapper_copied_before_the_first_step(trial, model):
    """Train the original and the copy independently, each on all ranks."""
    copied = copy.deepcopy(model)
    yield state_of(copied)
    yield from trained(model, squares(trial))
    yield state_of(copied)
    for step in stepped(sgd(copied), 3):
        copied(trial.batch(10 + step)).square().mean().backward()
        yield gradients(copied)
    yield [state_of(model), state_of(copied)]


@trains(normed)
def wrapper_copied_in_the_middle(trial, model):
    yield from trained(model, squares(trial))
    copied = copy.deepcopy(model)
    for step in range(3):
        for one in (model, copied):
            one.zero_grad()
            one(trial.batch(step)).square().mean().backward()
        yield [gradients(copied), state_of(copied)]


@trains(normed)
def first_step_in_eval_mode(trial, model):
    """Train in eval mode, as for fine-tuning with frozen statistics, then in training mode."""
    model.eval()
    yield from trained(model, squares(trial))
    model.train()
    yield from trained(model, squares(trial))


@trains(normed)
def training_and_eval_mode_in_turn(trial, model):
    """Alternate training and eval mode, both with gradients; step 3 has no backward pass."""
    for step in stepped(model, 6):
        model.train(step % 2 == 0)
        loss = squares(trial)(model, step)
        yield loss if step == 3 else backward(loss)


def wrapper_in_a_checkpoint_that_is_not_reentrant(trial, model, step):
    x = trial.batch(step).requires_grad_()
    return checkpoint(model, x, use_reentrant=False).square().mean()


def wrapper_in_a_reentrant_checkpoint(trial, model, step):
    x = trial.batch(step).requires_grad_()
    return checkpoint(model, x, use_reentrant=True).square().mean()


def first_forward_without_backward_on_one_rank(trial, model):
    """Run forward on one rank only, which a model without buffers allows."""
    with torch.no_grad():
        yield model(trial.batch(30)).shape if trial.rank == 1 else None
    yield from trained(model, squares(trial))
