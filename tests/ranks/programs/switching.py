"""Trainings long enough for "auto" to try all exchanges, and for "host" to try chunks.

These trials must not change the results.
"""

import copy

import torch
from declared import plain, programs, trains
from graphs import tied
from outside_the_module import prompt_outside_of_the_wrapper
from torch import Tensor, nn
from unused import Experts

from steps import alone, backward, learn, mlp, normed, sgd, squares, stepped, trained
from trial import state_of

STEPS = 64  # exchange "auto" has finished its trials after 56


def deep() -> nn.Sequential:
    return mlp(6, 8, 8, 8, 8, 3)


@trains(lambda: deep().float())
def adam_in_float32_through_all_exchanges(trial, model):
    for step in stepped(torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3), STEPS):
        yield backward(model(trial.batch(step, dtype=torch.float32)).square().mean())


@trains(lambda: nn.Sequential(*normed()[:2], nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 3)))
def batch_norm_and_evaluation_through_all_exchanges(trial, model):
    for seen in trained(model, squares(trial), steps=STEPS):
        yield seen
        yield trial.evaluated(model, 100)


@trains(deep)
def accumulation_through_all_exchanges(trial, model):
    for step in stepped(model, STEPS, lambda step: step % 5 != 1):
        yield alone(trial, model, 100 + step)
        yield learn(trial, model, step)


@trains(lambda: Experts(4), find_unused_parameters=True, steps=STEPS)
def experts_through_all_exchanges(trial, model, step):
    """Experts change with step and rank; expert 3 is first used in step 31."""
    chosen = [(step + trial.rank * (step // 4)) % 3, *([3] if step > 30 else [])]
    return model(trial.batch(step), chosen).square().mean()


@trains(deep, steps=STEPS)
def several_forwards_through_all_exchanges(trial, model, step):
    """Run two forward passes for each backward pass, and one without backward."""
    model(trial.batch(200 + step))
    return (model(trial.batch(step)) - model(trial.batch(100 + step))).square().mean()


def gradients_kept_through_all_exchanges(trial, model):
    held: list[Tensor] = []
    for step in stepped(model, STEPS):
        learn(trial, model, step)
        held.append(model.module[0].weight.grad)
        yield held[::8]


@trains(lambda: mlp(4, 8, 3))
def prompt_outside_through_all_exchanges(trial, model):
    yield from prompt_outside_of_the_wrapper(trial, model, steps=STEPS)


def two_models_through_all_exchanges(trial):
    """Two models try exchanges independently, in different steps."""
    models = [trial.wrap(mlp(6, 8, 6)), trial.wrap(mlp(6, 8, 1))]
    for step in stepped([sgd(model) for model in models], STEPS):
        x = models[0](trial.batch(step))
        yield backward((models[1](x) if step % 3 else x).square().mean())


@trains(deep)
def copied_while_exchanges_are_tried(trial, model):
    copies = []
    for seen in trained(model, squares(trial), steps=STEPS):
        yield seen
        if len(copies) < 2:
            copies.append(copy.deepcopy(model))
            trial.watch(copies[-1])
    for step in stepped([sgd(one) for one in copies], 4):
        yield [learn(trial, one, step) for one in copies]


@trains(deep)
def saved_while_exchanges_are_tried(trial, model):
    """Stop during the trials, and resume from a checkpoint with a new wrapper."""
    optimizer = sgd(model)
    yield from trained(model, squares(trial), optimizer, steps=15)
    states = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    fresh = trial.wrap(deep())
    other = sgd(fresh)
    fresh.load_state_dict(states[0])
    other.load_state_dict(states[1])
    yield from trained(fresh, squares(trial), other, steps=STEPS)
    yield state_of(fresh)


@trains(deep)
def uneven_inputs_through_all_exchanges(trial, model):
    """Alternate uneven epochs in join() with equal numbers of batches."""
    optimizer = sgd(model)
    for epoch in range(4):
        with model.join():
            for step in stepped(optimizer, 8 - 3 * trial.rank):
                yield learn(trial, model, 10 * epoch + step)
        yield from trained(model, squares(trial), optimizer, steps=8)


programs(
    __name__,
    {
        "through_all_exchanges": plain(deep, STEPS),
        "views_of_buckets_through_all_exchanges": plain(
            deep, STEPS, set_to_none=lambda step: step % 3 == 0, gradient_as_bucket_view=True
        ),
        "static_graph_with_checkpoints_through_all_exchanges": tied(
            True, 2, steps=STEPS, static_graph=True
        ),
    },
)
