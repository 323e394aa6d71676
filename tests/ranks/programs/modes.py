"""Modules that are evaluated, copied or saved before training, and training in eval mode."""

import copy

import torch
from checkpoints import saved
from declared import trains
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from steps import backward, learn, mlp, normed, sgd, squares, stepped, trained
from trial import state_of


@trains(normed)
def evaluated_before_the_first_step(trial, model):
    """All ranks have rank 0's values from the construction on."""
    yield trial.evaluated(model)
    yield from trained(model, squares(trial))
    yield trial.evaluated(model)


@trains(normed)
def sanity_check_before_training(trial, model):
    """Evaluate two batches before training and one in inference mode later, as Lightning does."""
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
    """Validate without no_grad, and keep graphs that never run backward."""
    model = trial.wrap(normed()).eval()
    outputs = [model(trial.batch(30 + step)) for step in range(3)]
    yield outputs
    model.train()
    yield from trained(model, squares(trial))
    yield outputs


@trains(normed)
def saved_before_the_first_step(trial, model):
    yield [state_of(model), dict(torch.load(saved(model.state_dict())))]
    yield from trained(model, squares(trial))
    yield state_of(model)


def module_copied_before_the_first_step(trial, model):
    """Train against a frozen target network that was copied from the wrapped module."""
    target = copy.deepcopy(model.module).requires_grad_(False)
    yield state_of(target)
    for step in stepped(model, 4):
        goal = target(trial.batch(20 + step)) * 0.9
        loss = backward((model(trial.batch(step)) - goal).square().mean())
        if step == 2:
            target.load_state_dict(model.module.state_dict())
        yield {"loss": loss, "target": state_of(target)}


def wrapper_copied_before_the_first_step(trial, model):
    """Train the original and the copy independently, each on all ranks."""
    copied = copy.deepcopy(model)
    trial.watch(copied)
    yield from trained(model, squares(trial))
    yield from trained(copied, squares(trial))


@trains(normed)
def wrapper_copied_in_the_middle(trial, model):
    yield from trained(model, squares(trial))
    copied = copy.deepcopy(model)
    trial.watch(copied)
    for step in stepped([sgd(model), sgd(copied)], 3):
        yield [learn(trial, one, step) for one in (model, copied)]


@trains(normed)
def averaged_from_before_the_first_step(trial, model):
    """Average the weights of the bare module and of the wrapper exponentially."""
    averages = [
        AveragedModel(one, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
        for one in (model.module, model)
    ]
    yield [state_of(average) for average in averages]
    for _ in trained(model, squares(trial), steps=4):
        for average, one in zip(averages, (model.module, model), strict=True):
            average.update_parameters(one)
        yield [state_of(average) for average in averages]
    with torch.no_grad():
        yield [average.eval()(trial.batch(30)) for average in averages]


def averaged_before_it_is_wrapped(trial):
    """A teacher that is copied before wrapping keeps each rank's own first values."""
    module = mlp()
    teacher = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for _ in trained(trial.wrap(module), squares(trial)):
        teacher.update_parameters(module)
        yield state_of(teacher)


@trains(normed)
def first_step_in_eval_mode(trial, model):
    """Train in eval mode, as for fine-tuning with frozen statistics, then in training mode."""
    model.eval()
    yield from trained(model, squares(trial))
    model.train()
    yield from trained(model, squares(trial))


@trains(normed, steps=4)
def batch_norm_layers_in_eval_mode(trial, model, step):
    """Keep a batch norm in eval mode while the other layers train, as detectors do."""
    model.train().module[1].eval()
    return squares(trial)(model, step)


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


@trains(normed)
def first_forward_without_backward(trial, model):
    """Run a dummy batch in training mode to infer shapes, without backward."""
    yield model(trial.batch(30)).shape
    yield from trained(model, squares(trial))


def first_forward_without_backward_on_one_rank(trial, model):
    """Run forward on one rank only, which a model without buffers allows."""
    with torch.no_grad():
        yield model(trial.batch(30)).shape if trial.rank == 1 else None
    yield from trained(model, squares(trial))


@trains(normed)
def evaluated_on_one_rank_only(trial, model):
    """Rank 0 validates the bare module while the others wait at a barrier."""
    for loss in trained(model, squares(trial)):
        if trial.rank == 0:
            trial.evaluated(model.module)
        torch.distributed.barrier()
        yield loss


def wrapped_again_after_training(trial):
    """Wrap a trained module again, as for a second phase of training."""
    module = mlp()
    for watched in (True, False):
        yield from trained(trial.wrap(module, watched=watched), squares(trial))


def weights_changed_between_construction_and_first_step(trial, model):
    """Weights that a rank changes after construction stay different, as with DDP."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * (1 + trial.rank))
    yield state_of(model)
    yield from trained(model, squares(trial))
