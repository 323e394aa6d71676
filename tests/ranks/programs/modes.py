"""Modules that are evaluated, copied or saved before they train, and first steps in eval mode."""

import copy
import io

import torch
from declared import trains
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from steps import backward, learn, mlp, normed, sgd, squares, stepped, trained
from trial import gradients, state_of


@trains(normed)
def sanity_check_before_training(trial, model):
    """As Lightning does: two validation batches first, with gradients off for all."""
    for step in range(2):
        yield trial.evaluated(model, 30 + step)
    optimizer = sgd(model)
    yield from trained(model, squares(trial), optimizer, steps=2)
    model.eval()
    with torch.inference_mode():
        yield model(trial.batch(30)).sum().item()
    model.train()
    yield from trained(model, squares(trial), optimizer)


def evaluated_with_gradients_on_before_training(trial):
    """Forgetting no_grad in validation keeps graphs alive that nobody runs backward through."""
    model = trial.wrap(normed()).eval()
    outputs = [model(trial.batch(30 + step)) for step in range(3)]
    yield outputs
    model.train()
    yield from trained(model, squares(trial))
    yield outputs


@trains(normed)
def saved_before_the_first_step(trial, model):
    yield state_of(model)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    yield dict(torch.load(file))
    yield from trained(model, squares(trial))
    yield state_of(model)


def module_copied_before_the_first_step(trial, model):
    """A target network that begins with the values of rank 0 on every rank."""
    target = copy.deepcopy(model.module).requires_grad_(False)
    yield state_of(target)
    for step in stepped(model, 4):
        goal = target(trial.batch(20 + step)) * 0.9
        loss = backward((model(trial.batch(step)) - goal).square().mean())
        if step == 2:
            target.load_state_dict(model.module.state_dict())
        yield {"loss": loss, "target": state_of(target)}


def wrapper_copied_before_the_first_step(trial, model):
    """Original and copy train independently of each other, each on all ranks."""
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
def averaged_from_before_the_first_step(trial, model):
    """Exponential averages of the bare module and of the wrapper, as both are written."""
    averages = [
        AveragedModel(one, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
        for one in (model.module, model)
    ]
    yield [state_of(average) for average in averages]
    optimizer = sgd(model)
    for step in range(4):
        optimizer.zero_grad()
        learn(trial, model, step)
        optimizer.step()
        for average, one in zip(averages, (model.module, model), strict=True):
            average.update_parameters(one)
        yield [state_of(average) for average in averages]
    with torch.no_grad():
        yield [average.eval()(trial.batch(30)) for average in averages]


@trains(normed)
def first_step_in_eval_mode(trial, model):
    """Fine-tuning with frozen statistics: the whole model stays in eval mode, and trains."""
    model.eval()
    yield from trained(model, squares(trial))
    model.train()
    yield from trained(model, squares(trial))


@trains(normed, steps=4)
def batch_norm_layers_in_eval_mode(trial, model, step):
    """Detectors keep their batch norms in eval mode while all else trains."""
    model.train()
    model.module[1].eval()
    return model(trial.batch(step)).square().mean()


@trains(normed)
def batches_of_one_kind_before_another(trial, model):
    """Training and evaluation by turns, each with gradients, some of which nobody uses."""
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


@trains(normed)
def first_forward_without_backward(trial, model):
    """A dummy batch to find out shapes, in training mode and with gradients on."""
    yield model(trial.batch(30)).shape
    yield from trained(model, squares(trial))


def first_forward_without_backward_on_one_rank(trial, model):
    """Without buffers a forward pass concerns nobody else: one rank may run it alone."""
    with torch.no_grad():
        yield model(trial.batch(30)).shape if trial.rank == 1 else None
    yield from trained(model, squares(trial))


@trains(normed)
def evaluated_on_one_rank_only(trial, model):
    """Rank 0 validates the bare module while the others wait."""
    for loss in trained(model, squares(trial)):
        if trial.rank == 0:
            trial.evaluated(model.module)
        torch.distributed.barrier()
        yield loss


def wrapped_again_after_training(trial):
    """The bare module of one wrapper goes into a second one, as between two phases of training."""
    module = mlp()
    yield from trained(trial.wrap(module), squares(trial))
    yield from trained(trial.wrap(module, watched=False), squares(trial))


def weights_changed_between_construction_and_first_step(trial, model):
    """What a rank changes by itself after construction stays its own, as with DDP."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * (1 + trial.rank))
    yield state_of(model)
    yield from trained(model, squares(trial))
