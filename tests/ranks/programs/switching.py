"""Trainings that are long enough for exchange "auto" to try all exchanges, and "host" its chunks.

Nothing of that may be seen in what is trained.
"""

import copy

import torch
from declared import trains
from torch import Tensor, nn
from unused import Experts

from steps import backward, mlp, module_of, sgd, squares, stepped, trained
from trial import gradients, state_of

STEPS = 44  # exchange "auto" has tried everything after 38


def deep() -> nn.Sequential:
    return mlp(6, 8, 8, 8, 8, 3)


def through_all_exchanges(trial):
    yield from trained(trial.wrap(deep()), squares(trial), steps=STEPS)


@trains(lambda: deep().float())
def adam_in_float32_through_all_exchanges(trial, model):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3)
    yield from trained(
        model,
        lambda model, step: model(trial.batch(step, dtype=torch.float32)).square().mean(),
        optimizer,
        steps=STEPS,
    )


def batch_norm_and_evaluation_through_all_exchanges(trial):
    module = nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 3)
    )
    model = trial.wrap(module)
    for seen in trained(model, squares(trial), steps=STEPS):
        yield seen
        yield trial.evaluated(model, 100)


@trains(deep)
def accumulation_through_all_exchanges(trial, model):
    optimizer = sgd(model)
    for step in range(STEPS):
        with model.no_sync():
            model(trial.batch(100 + step)).square().mean().backward()
            yield "alone"
        model(trial.batch(step)).square().mean().backward()
        yield "together"
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 5 != 0)


@trains(lambda: Experts(4), find_unused_parameters=True)
def experts_through_all_exchanges(trial, model):
    """Used by turns, differently on each rank; expert 3 for the first time in step 30."""
    for step in stepped(model, STEPS):
        chosen = [(step + trial.rank * (step // 4)) % 3, *([3] if step > 30 else [])]
        model(trial.batch(step), chosen).square().mean().backward()
        yield step


@trains(deep, steps=STEPS)
def several_forwards_through_all_exchanges(trial, model, step):
    """Two forward passes for one backward, and one that nobody runs backward through."""
    model(trial.batch(200 + step))
    return (model(trial.batch(step)) - model(trial.batch(100 + step))).square().mean()


def gradients_kept_through_all_exchanges(trial, model):
    held: list[Tensor] = []
    for step in stepped(model, STEPS):
        model(trial.batch(step)).square().mean().backward()
        held.append(model.module[0].weight.grad)
        yield held[::8]


@trains(deep, gradient_as_bucket_view=True)
def views_of_buckets_through_all_exchanges(trial, model):
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=step % 3 == 0)
        yield backward(model(trial.batch(step)).square().mean())
        optimizer.step()


@trains(lambda: mlp(4, 8, 3))
def prompt_outside_through_all_exchanges(trial, model):
    prompt = nn.Parameter(torch.zeros(4))
    for step in stepped(sgd([*model.parameters(), prompt]), STEPS):
        model(trial.batch(step, 4, 4) + prompt).sum().mul(1e-3).backward()
        yield prompt.grad


def two_models_through_all_exchanges(trial):
    """Each tries for itself, at other times than the other."""
    models = [trial.wrap(mlp(6, 8, 6)), trial.wrap(mlp(6, 8, 1))]
    optimizers = [sgd(model) for model in models]
    for step in stepped(optimizers, STEPS):
        x = models[0](trial.batch(step))
        if step % 3:
            x = models[1](x)
        x.square().mean().backward()
        yield step


@trains(deep)
def copied_while_exchanges_are_tried(trial, model):
    copies = []
    for seen in trained(model, squares(trial), steps=STEPS):
        yield seen
        if len(copies) < 2 and not model.module[0].weight.grad.isnan().any():
            copies.append(copy.deepcopy(model))
    for step in range(4):
        for one in copies:
            one.zero_grad()
            one(trial.batch(step)).square().mean().backward()
        yield [gradients(one) for one in copies]


@trains(deep)
def saved_while_exchanges_are_tried(trial, model):
    """A training that is stopped and goes on from a checkpoint, in the middle of the trials."""
    optimizer = sgd(model)
    yield from trained(model, squares(trial), optimizer, steps=15)
    states = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    fresh = trial.wrap(deep())
    other = sgd(fresh)
    fresh.load_state_dict(states[0])
    other.load_state_dict(states[1])
    yield from trained(fresh, squares(trial), other, steps=STEPS)
    yield state_of(fresh)


def static_graph_with_checkpoints_through_all_exchanges(trial):
    from torch.utils.checkpoint import checkpoint

    @module_of(layer=mlp(6, 8, 6), head=mlp(6, 3))
    def repeated(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + checkpoint(self.layer, x, use_reentrant=True)
        return self.head(x)

    model = trial.wrap(repeated, static_graph=True)
    yield from trained(
        model,
        lambda model, step: model(trial.batch(step).requires_grad_()).square().mean(),
        steps=STEPS,
    )


@trains(deep)
def uneven_inputs_through_all_exchanges(trial, model):
    """Epochs in join(), with training on equal batches between them."""
    optimizer = sgd(model)
    for epoch in range(4):
        with model.join():
            for step in stepped(optimizer, 8 - 3 * trial.rank):
                model(trial.batch(10 * epoch + step)).square().mean().backward()
                yield gradients(model.module)
        yield from trained(model, squares(trial), optimizer, steps=8)
