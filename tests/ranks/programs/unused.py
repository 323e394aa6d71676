"""Modules with unused parts: experts, heads, frozen layers."""

from collections.abc import Iterator
from typing import Any

import torch
from declared import plain, program, programs, trains
from torch import Tensor, nn

from steps import backward, learn, makes, mlp, sgd, squares, stepped, trained
from trial import Run, Trial


class Experts(nn.Module):
    """A gate and experts; only the `chosen` experts compute."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(6, experts)
        self.experts = nn.ModuleList(mlp(6, 8, 3) for _ in range(experts))

    def forward(self, x: Tensor, chosen: list[int]) -> Tensor:
        weights = self.gate(x).softmax(1)
        return sum(weights[:, i : i + 1] * self.experts[i](x) for i in chosen)


@makes(lambda: {"gate": nn.Linear(6, 4), "experts": nn.ModuleList(mlp(6, 3) for _ in range(4))})
def routed(self, x):
    """Give each sample to its best expert: what is used depends on the data."""
    choices = zip(x, *self.gate(x).softmax(1).max(1), strict=True)
    return torch.stack([self.experts[best](sample) * score for sample, score, best in choices])


@makes(lambda: {"body": mlp(6, 8, 8), "heads": nn.ModuleList(nn.Linear(8, 2) for _ in range(3))})
def heads(self, x, tasks):
    """Run a body, and one head for each task."""
    features = self.body(x)
    return [self.heads[task](features) for task in tasks]


def _experts(choices: list[list[list[int]]], experts: int = 3, **options: Any) -> Run:
    """Return a program that trains the experts `choices[step][rank]`."""

    def run(trial: Trial) -> Iterator[Any]:
        model = trial.wrap(Experts(experts), find_unused_parameters=True, **options)
        for step, chosen in stepped(model, enumerate(choices)):
            yield backward(model(trial.batch(step), chosen[trial.rank]).square().mean())

    return run


OTHER_EXPERTS = [[[0], [1]], [[0, 1], [2]], [[2], [2]], [[1], [0]], [[0, 1, 2], [0, 1, 2]]]
LATE = [[[0], [0]], [[0], [0]], [[0], [0]], [[0, 2], [0]], [[1], [2]]]


@trains(lambda: Experts(3), find_unused_parameters=True)
def gradients_of_unused_experts_kept(trial, model):
    """Without zero_grad, the .grad of an unused expert does not change."""
    for step, chosen in enumerate([[[0, 1], [0]], [[0], [0]], [[2], [0]], [[0], [0]]]):
        yield backward(model(trial.batch(step), chosen[trial.rank]).square().mean())


@trains(heads, find_unused_parameters=True)
def heads_that_take_turns(trial, model):
    turns = [[0], [0]], [[1], [0]], [[0, 1], [2]], [[2], [2]]
    for step, tasks in stepped(model, enumerate(turns)):
        outputs = model(trial.batch(step), tasks[trial.rank])
        yield backward(sum(out.square().mean() for out in outputs))


@trains(heads, find_unused_parameters=True)
def output_that_is_not_in_the_loss(trial, model):
    """All heads compute, but the loss uses one: the others' gradients stay None."""
    for step, used in stepped(model, enumerate([(0, 0), (1, 0), (2, 1)])):
        yield backward(model(trial.batch(step), range(3))[used[trial.rank]].square().mean())


@trains(lambda: Experts(3), find_unused_parameters=True)
def unused_parameters_with_accumulation(trial, model):
    """An expert that only the micro-batches in no_sync touch."""
    for step in stepped(model, 3):
        with model.no_sync():
            yield backward(model(trial.batch(step), [1 + trial.rank]).square().mean())
        yield backward(model(trial.batch(10 + step), [0]).square().mean())


@program(raises="RuntimeError")
def unused_parameter_that_nobody_seeks(trial):
    """DDP raises in the forward pass after the one with missing gradients.

    Until then the gradients are undefined: only some buckets were exchanged.
    """
    model = trial.wrap(Experts(2), watched=False)
    for step in range(3):
        out = model(trial.batch(step), [0])
        yield out
        out.square().mean().backward()
        yield "backward"


@program(raises="RuntimeError")
def unused_parameter_that_nobody_seeks_in_a_later_step(trial):
    model = trial.wrap(Experts(2))
    for step, chosen in enumerate([[0, 1], [0, 1], [0], [0, 1], [0, 1]]):
        model.zero_grad()
        out = model(trial.batch(step), chosen)
        yield out
        out.square().mean().backward()
        if chosen == [0, 1]:
            yield "backward"


def frozen_after_construction_and_not_sought(trial, model):
    """Freeze a layer after wrapping; DDP would report missing gradients, so it is wrapped again."""
    yield from trained(model, squares(trial))
    model.module[0].requires_grad_(False)
    if trial.is_torch:
        model = trial.wrap(model.module, watched=False)
    yield from trained(model, squares(trial))


@trains(lambda: mlp(6, 8, 8, 3), find_unused_parameters=True, steps=6)
def frozen_after_construction(trial, model, step):
    model.module[2].requires_grad_(step not in (2, 3))
    return model(trial.batch(step)).square().mean()


def _run_dry() -> nn.Module:
    module = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(3))
    module(torch.zeros(1, 6))
    return module


def _frozen() -> nn.Module:
    """Frozen layers at both ends and in the middle."""
    module = mlp(6, 8, 8, 8, 3)
    module[0].requires_grad_(False)
    module[4].weight.requires_grad_(False)
    return module


def unfrozen_in_the_middle_with_a_new_group(trial):
    """Unfreeze a layer after wrapping; DDP would not exchange it, so it is wrapped again."""
    module = mlp(6, 8, 8, 3)
    module[0].requires_grad_(False)
    model = trial.wrap(module)
    optimizer = sgd(parameter for parameter in model.parameters() if parameter.requires_grad)
    for step in stepped(optimizer, 6):
        if step == 3:
            module[0].requires_grad_(True)
            if trial.is_torch:
                model = trial.wrap(module, watched=False)
            optimizer.add_param_group({"params": list(module[0].parameters()), "lr": 0.01})
        yield learn(trial, model, step)


def unfrozen_and_wrapped_anew(trial):
    """Unfreeze gradually, with a new wrapper for each phase."""
    module = mlp(6, 8, 8, 3)
    module[:4].requires_grad_(False)
    for layer in (4, 2, 0):
        module[layer].requires_grad_(True)
        model = trial.wrap(module, watched=layer == 4)
        yield from trained(
            model, squares(trial), sgd(p for p in model.parameters() if p.requires_grad)
        )


programs(
    __name__,
    {
        "everything_frozen": plain(lambda: mlp().requires_grad_(False)),
        "module_without_parameters": plain(nn.ReLU),
        "lazy_module_without_shapes": plain(
            lambda: nn.Sequential(nn.LazyLinear(8), nn.LazyLinear(3))
        ),
    },
    raises="RuntimeError",
)


programs(
    __name__,
    {
        "modules_of_other_shapes_on_the_other_rank": lambda trial: trained(
            trial.wrap(mlp(6, 8 + trial.rank, 3)), squares(trial)
        ),
        "modules_with_more_parameters_on_the_other_rank": lambda trial: trained(
            trial.wrap(mlp(6, *[8] * (2 - trial.rank), 3)), squares(trial)
        ),
    },
    raises="RuntimeError",
    wait_s=3.0,
)


programs(
    __name__,
    {
        # From the first batch on; expert 3 is never used, and its gradient stays None.
        "other_experts_on_the_other_rank": _experts(OTHER_EXPERTS, 4),
        "other_experts_with_gradients_as_views": _experts(
            OTHER_EXPERTS, 4, gradient_as_bucket_view=True
        ),
        # Unused in the first steps, in which exchanges learn the order of gradients.
        "expert_that_is_used_late": _experts(LATE),
        "parameter_that_nobody_ever_uses": _experts([[[0, 1], [0, 1]]] * 4),
        "samples_routed_by_their_data": plain(routed, steps=6, find_unused_parameters=True),
        "lazy_module_after_a_dry_run": plain(_run_dry),
        # Frozen parameters have no gradient and are not exchanged.
        "frozen_before_construction": plain(_frozen),
        "unused_parameters_sought_where_there_are_none": plain(mlp, find_unused_parameters=True),
    },
)
