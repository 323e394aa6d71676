"""Loops in which ranks differ, or in which other work runs between or during steps."""

import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from declared import trains
from switching import STEPS, deep
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from steps import backward, joint, learn, mlp, normed, squares, stepped, trained, zeroed
from trial import state_of


@trains(deep)
def wrapper_evaluated_on_rank_0_before_a_barrier(trial, model):
    """Rank 0 validates with the wrapper; the other waits at the user's barrier."""
    for seen in trained(model, squares(trial), steps=STEPS):
        yield seen
        if trial.rank == 0:
            trial.evaluated(model, 100)
        dist.barrier()


@trains(deep)
def wrapper_evaluated_in_training_mode_on_rank_1_before_a_barrier(trial, model):
    """A user forgets eval(): without buffers a forward pass still concerns nobody else."""
    for seen in trained(model, squares(trial), steps=STEPS):
        yield seen
        if trial.rank == 1:
            with torch.no_grad():
                model(trial.batch(100))
        dist.barrier()


@trains(deep)
def forward_with_gradients_on_one_rank_before_a_barrier(trial, model):
    """Run an extra forward pass on one rank, without backward.

    DDP synchronizes ranks only in its second forward pass, so the extra passes start after it.
    """
    for step, seen in enumerate(trained(model, squares(trial), steps=STEPS)):
        yield seen
        if step >= 2:
            if trial.rank == step % 2:
                model(trial.batch(100))
            dist.barrier()


@trains(deep)
def metrics_reduced_between_forward_and_backward(trial, model):
    for step in stepped(model, STEPS):
        loss = squares(trial)(model, step)
        total = joint(loss)
        loss.backward()
        yield total


@trains(deep)
def collective_that_runs_beside_backward(trial, model):
    """Start an all-reduce in the same group before backward, and wait for it afterwards."""
    for step in stepped(model, STEPS):
        loss = model(trial.batch(step)).square().mean()
        total = torch.full((1000,), loss.item())
        work = dist.all_reduce(total, async_op=True)
        loss.backward()
        work.wait()
        yield total[:2]


def collective_in_a_hook_of_a_gradient(trial):
    """All-reduce the gradient of an activation in a hook, during the exchange."""
    module = mlp(6, 8, 8, 3)

    module[2].register_forward_hook(
        lambda module, args, out: out.register_hook(lambda slope: joint(slope) / 2) and None
    )
    model = trial.wrap(module)
    yield from trained(model, squares(trial))


@trains(deep, steps=12)
def ranks_of_unequal_speed(trial, model, step):
    """Delay a rank before forward in some steps, and before backward in others."""
    time.sleep(0.01 if (step + trial.rank) % 3 == 0 else 0)
    loss = model(trial.batch(step)).square().mean()
    time.sleep(0.01 if (step + trial.rank) % 3 == 1 else 0)
    return loss


@trains(deep)
def loader_with_a_forked_worker(trial, model):
    """Each epoch forks a process, which inherits the wrapper's files and memory."""
    data = TensorDataset(torch.cat([trial.batch(step) for step in range(4)]))
    for _ in range(3):
        for (x,) in stepped(
            model, DataLoader(data, batch_size=4, num_workers=1, multiprocessing_context="fork")
        ):
            yield backward(model(x).square().mean())


def profiler_around_the_steps(trial, model):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        yield from trained(model, squares(trial))
    names = {event.key for event in profile.key_averages()}
    yield "DistributedDataParallel.forward" in names


def operations_counted(trial, model):
    """FlopCounterMode counts the module's operations, and none of the exchange."""
    yield from trained(model, squares(trial))
    model.zero_grad()
    with FlopCounterMode(display=False) as counter:
        learn(trial, model, 0)
    yield counter.get_total_flops()


def anomalies_detected(trial, model):
    with torch.autograd.detect_anomaly(check_nan=True):
        yield from trained(model, squares(trial))
        loss = (model(trial.batch(9)) * float("nan")).sum()
        yield trial.refused(loss.backward)


@trains(lambda: mlp(6, 8, 4))
def backward_in_other_ways(trial, model):
    """Run backward in no_grad, of two tensors, with a gradient, and in one thread."""
    for way in zeroed(model, 4):
        out = model(trial.batch(way))
        if way == 0:
            loss = out.sum()
            with torch.no_grad():
                loss.backward()
        elif way == 1:
            one, other = out.chunk(2, dim=1)
            torch.autograd.backward([one.sum(), other.square().sum()])
        elif way == 2:
            out.backward(torch.ones_like(out) * 0.5)
        else:
            with torch.autograd.set_multithreading_enabled(False):
                out.square().sum().backward()
        yield out


@trains(deep)
def bare_module_trained_between_the_steps(trial, model):
    """Backward passes of the bare module between steps are not exchanged."""
    for step in stepped(model, STEPS):
        if step % 3 == 0:
            yield learn(trial, model.module, 100 + step)
            model.zero_grad()
        yield learn(trial, model, step)


@trains(deep)
def bare_module_on_one_rank_only(trial, model):
    for step, seen in enumerate(trained(model, squares(trial), steps=12)):
        yield seen
        if trial.rank == step % 2:
            kept = [parameter.grad for parameter in model.parameters()]
            model.zero_grad()
            model.module(trial.batch(100)).sum().backward()
            for parameter, gradient in zip(model.parameters(), kept, strict=True):
                parameter.grad = gradient


def wrapper_and_bare_module_in_one_loss(trial, model, step):
    """Consistency training: one branch uses the wrapper, the other the bare module."""
    x = trial.batch(step)
    return (model(x) - model.module(x * 1.1)).square().mean()


def inner_steps_of_meta_learning(trial, model):
    """MAML: the inner loop has its own weights; the outer loss also uses the wrapper."""
    for step in stepped(model, 3):
        weights = dict(model.module.named_parameters())
        inner = torch.func.functional_call(model.module, weights, (trial.batch(step),))
        slopes = torch.autograd.grad(
            inner.square().mean(), list(weights.values()), create_graph=True
        )
        fast = {n: w - 0.1 * s for (n, w), s in zip(weights.items(), slopes, strict=True)}
        outer = torch.func.functional_call(model.module, fast, (trial.batch(10 + step),))
        (outer.square().mean() + model(trial.batch(20 + step)).square().mean()).backward()
        yield outer


def second_wrapper_while_the_first_lives(trial):
    module = mlp()
    models = [trial.wrap(module), trial.wrap(module, watched=False)]
    for step in range(6):
        module.zero_grad()
        yield backward(models[step // 2 % 2](trial.batch(step)).square().mean())


def wrapper_around_a_module_with_a_wrapper(trial):
    """Wrap a module that contains a wrapper, and ignore the inner wrapper's parameters."""
    inner = trial.wrap(mlp(6, 8, 8), watched=False)
    outer = nn.Sequential(inner, nn.Tanh(), nn.Linear(8, 3))
    names = [f"0.{name}" for name, _ in inner.named_parameters()]
    kind = nn.parallel.DistributedDataParallel
    kind._set_params_and_buffers_to_ignore_for_model(outer, names)
    yield from trained(trial.wrap(outer), squares(trial))


@trains(normed)
def ranks_in_different_modes(trial, model):
    """Train rank 1 in eval mode; no rank may wait for buffers of the other."""
    model.train(trial.rank == 0)
    yield from trained(model, squares(trial), steps=5)


def model_of_many_megabytes(trial):
    """Parameters that are larger than one of DDP's buckets."""
    module = nn.Sequential(nn.Linear(6, 1200), nn.Tanh(), nn.Linear(1200, 6000)).float()
    model = trial.wrap(module, watched=False)
    for step in zeroed(model, 3):
        model(trial.batch(step, dtype=torch.float32)).square().mean().backward()
        yield [(p.grad.sum(), p.grad.flatten()[-5:]) for p in model.parameters()]


def steps_under_many_settings(trial, model):
    """Change the default dtype, deterministic algorithms and inference mode between steps."""
    for step, around in enumerate([torch.enable_grad(), nullcontext(), torch.inference_mode()]):
        with around:
            yield state_of(model)
            model(trial.batch(100, dtype=torch.float64))
        torch.use_deterministic_algorithms(step == 1)
        torch.set_default_dtype(torch.float32 if step == 1 else torch.float64)
        model.zero_grad()
        yield backward(model(trial.batch(step, dtype=torch.float64)).square().mean())
    torch.use_deterministic_algorithms(False)
