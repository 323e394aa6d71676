"""Optimizers, schedules, and other work between backward and the next forward pass."""

import torch
import torch.distributed as dist
from declared import program
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

from steps import backward, learn, mlp, sgd, squares, stepped, trained, zeroed
from trial import OURS

HOOK = {"refused_by": OURS, "refusal": "hook"}


def clipping_by_norm_and_by_value(trial, model):
    for step in stepped(model, 4):
        (model(trial.batch(step)).square().mean() * 100).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
        yield norm


def optimizer_made_before_wrapping(trial):
    """An optimizer created before wrapping still updates the same parameter objects."""
    module = mlp()
    optimizer = sgd(module)
    before = [id(parameter) for parameter in module.parameters()]
    model = trial.wrap(module)
    yield from trained(model, squares(trial), optimizer)
    assert before == [id(parameter) for parameter in model.parameters()]


def optimizer_in_hooks_after_each_gradient(trial, model):
    """register_post_accumulate_grad_hook sees this rank's own gradient, as with DDP."""
    seen: list[Tensor] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    for loss in trained(model, squares(trial)):
        yield [loss, sorted(float(gradient.sum()) for gradient in seen)]
        seen.clear()


def lbfgs_with_a_closure(trial, model):
    """Many forward and backward passes in one step of the optimizer."""
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    for step in range(2):
        losses = []

        def closure(step: int = step, losses: list[Tensor] = losses) -> Tensor:
            optimizer.zero_grad()
            # The same loss on all ranks, or they would diverge.
            loss = backward(model(torch.ones(2, 6) * (step + 1)).square().mean())
            losses.append(loss)
            return loss

        optimizer.step(closure)
        yield losses


@program(**HOOK)
def local_sgd_after_some_steps(trial):
    """Average gradients for two steps, then parameters in every second step."""
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as hooks

    model = trial.wrap(mlp())
    state = hooks.PostLocalSGDState(
        process_group=None,
        subgroup=dist.group.WORLD,
        start_localSGD_iter=2,
        post_local_gradient_allreduce=False,
    )
    model.register_comm_hook(state, hooks.post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(sgd(model), PeriodicModelAverager(period=2, warmup_steps=2))
    yield from trained(model, squares(trial), optimizer, steps=6)


def parameters_moved_by_the_user(trial, model):
    """SGD by hand, with .data, as in the oldest tutorials."""
    for step in zeroed(model, 3):
        yield learn(trial, model, step)
        for parameter in model.parameters():
            parameter.data = parameter.data - 0.1 * parameter.grad.data
