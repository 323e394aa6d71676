"""torch.compile before and after wrapping."""

import shutil
from typing import Any

import torch
from declared import plain, program, programs
from torch import Tensor, nn

from steps import alone, learn, makes, mlp, squares, stepped, trained

COMPILED = {"counts": False, "deadline_s": 90.0}


@makes(lambda: {"first": mlp(6, 8, 8), "last": mlp(8, 8, 3)})
def branching(self, x):
    """Take a branch that depends on the data, which breaks the graph."""
    x = self.first(x)
    if x.sum() > 1e6:
        x = x * 2
    return self.last(x)


def compiled(module: nn.Module, backend: str = "aot_eager") -> Any:
    torch._dynamo.reset()
    return torch.compile(module, backend=backend)


def compiled_in_place(module: nn.Module, backend: str) -> nn.Module:
    torch._dynamo.reset()
    module.compile(backend=backend)
    return module


programs(
    __name__,
    {
        "compiled_before_it_is_wrapped": plain(lambda: compiled(mlp())),
        "compiled_before_with_the_eager_backend": plain(lambda: compiled(branching(), "eager")),
        "wrapper_that_is_compiled": lambda trial: trained(
            compiled(trial.wrap(mlp())), squares(trial)
        ),
        "wrapper_that_is_compiled_in_place": lambda trial: trained(
            compiled_in_place(trial.wrap(mlp()), "eager"), squares(trial)
        ),
        "wrapper_with_graph_breaks_that_is_compiled": lambda trial: trained(
            compiled(trial.wrap(branching()), "eager"), squares(trial)
        ),
    },
    **COMPILED,
)


@program(**COMPILED)
def module_that_is_compiled_in_place(trial):
    model = trial.wrap(compiled_in_place(mlp(), "aot_eager"))
    yield from trained(model, squares(trial))
    yield list(model.state_dict())


@program(**COMPILED)
def step_that_is_compiled(trial):
    """Compile a loss function that calls the wrapper."""
    torch._dynamo.reset()
    model = trial.wrap(mlp())

    @torch.compile(backend="eager")
    def loss_of(x: Tensor) -> Tensor:
        return model(x).square().mean()

    yield from trained(model, lambda _, step: loss_of(trial.batch(step)))


@program(**COMPILED)
def compiled_module_with_accumulation_and_evaluation(trial):
    model = trial.wrap(compiled(mlp()))
    for step in stepped(model, 4):
        alone(trial, model, step)
        yield learn(trial, model, 10 + step)
        yield trial.evaluated(model, 20 + step)


@program(counts=False, deadline_s=200.0)
def compiled_by_inductor(trial):
    """Compile with inductor, if g++ is installed."""
    if shutil.which("g++") is None:
        return
    model = trial.wrap(compiled(nn.Linear(6, 3), "inductor"))
    yield from trained(model, squares(trial), steps=2)
