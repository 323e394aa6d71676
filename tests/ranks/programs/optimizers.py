"""Optimizers, schedules, and other work between backward and the next forward pass."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from declared import program, trains
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

from steps import alone, backward, joint, learn, mlp, normed, sgd, squares, stepped, trained, zeroed
from trial import OURS, kept, state_of

HOOK = {"refused_by": OURS, "refusal": "hook"}


class Muonlike(torch.optim.SGD):
    """Momentum, orthogonalized for matrices by a few Newton-Schulz steps, as in Muon."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            momentum = self.state[parameter].setdefault("m", torch.zeros_like(parameter))
            update = momentum.lerp_(parameter.grad, 0.1)
            if parameter.ndim == 2:
                update = momentum / (momentum.norm() + 1e-3)
                for _ in range(3):
                    update = 1.5 * update - 0.5 * update @ update.T @ update
            parameter.sub_(update, alpha=0.02)


def every_common_optimizer(trial):
    """Large epsilons keep Adam from amplifying the rounding errors of zero gradients."""
    makers: list[Callable[[Any], torch.optim.Optimizer]] = [
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-3, fused=True),
        lambda parameters: torch.optim.Adam(parameters, lr=0.01, eps=1e-3, foreach=True),
        lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, eps=1e-3, centered=True),
        lambda parameters: torch.optim.Adagrad(parameters, lr=0.01, eps=1e-3),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
        torch.optim.Adafactor,
        Muonlike,
    ]
    for make in makers:
        model = trial.wrap(mlp())
        yield from trained(model, squares(trial), make(model.parameters()))


def clipping_by_norm_and_by_value(trial, model):
    for step in stepped(model, 4):
        (model(trial.batch(step)).square().mean() * 100).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
        yield norm


@trains(lambda: mlp(6, 8, 8, 3))
def schedule_with_warm_up_and_two_groups(trial, model):
    decayed = {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1}
    others = {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0}
    optimizer = torch.optim.AdamW([decayed, others], lr=0.01, eps=1e-3)
    parts = [LinearLR(optimizer, 0.1, total_iters=2), CosineAnnealingLR(optimizer, 4)]
    schedule = SequentialLR(optimizer, parts, [2])
    for loss in trained(model, squares(trial), optimizer, steps=5):
        yield [loss, schedule.get_last_lr()]
        schedule.step()


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


def sharpness_aware_minimization(trial, model):
    """SAM: two backward passes per step, of which only the second is exchanged."""
    for step in stepped(model, 4):
        alone(trial, model, step)
        moves = [0.05 * p.grad / (p.grad.norm() + 1e-3) for p in model.parameters()]
        torch._foreach_add_([p.data for p in model.parameters()], moves)
        model.zero_grad()
        loss = learn(trial, model, step)
        torch._foreach_sub_([p.data for p in model.parameters()], moves)
        yield loss


@trains(lambda: mlp(6, 8, 8, 3))
def zero_redundancy_optimizer(trial, model):
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01, eps=1e-3)
    yield from trained(model, squares(trial), optimizer)
    optimizer.consolidate_state_dict(to=0)
    if trial.rank == 0:
        yield kept(optimizer.state_dict()["state"])


@trains(normed)
def averaged_weights_and_their_batch_norms(trial, model):
    """SWA as in PyTorch's documentation, with update_bn at the end."""
    average, optimizer = AveragedModel(model), sgd(model)
    schedule = SWALR(optimizer, swa_lr=0.01, anneal_epochs=2)
    for loss in trained(model, squares(trial), optimizer, steps=4):
        average.update_parameters(model)
        schedule.step()
        yield [loss, state_of(average)]
    update_bn([trial.batch(40), trial.batch(41)], average)
    yield state_of(average)


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


def model_averaging_without_a_hook(trial, model):
    """Local SGD by hand: no_sync in all steps, and averaged parameters in every second one."""
    averager = PeriodicModelAverager(period=2, warmup_steps=0)
    for step in stepped(model, 5):
        yield alone(trial, model, step)
        averager.average_parameters(model.parameters())


def parameters_moved_by_the_user(trial, model):
    """SGD by hand, with .data, as in the oldest tutorials."""
    for step in zeroed(model, 3):
        yield learn(trial, model, step)
        for parameter in model.parameters():
            parameter.data = parameter.data - 0.1 * parameter.grad.data


def gradient_noise_and_centralization(trial, model):
    """Gradients are changed in place after backward, before the optimizer sees them."""
    for loss in trained(model, squares(trial)):
        generator = torch.Generator().manual_seed(7)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.grad.sub_(parameter.grad.mean(1, keepdim=True))
            parameter.grad.add_(torch.randn(parameter.shape, generator=generator), alpha=1e-3)
        yield loss


def learning_that_stops_on_all_ranks(trial, model):
    """Early stopping: the flag is reduced between steps, in the user's own collective."""
    for loss in trained(model, squares(trial), steps=8):
        total = joint(loss["loss"])
        yield [loss, total]
        if joint(total < 0.2, dist.ReduceOp.MAX):
            break
