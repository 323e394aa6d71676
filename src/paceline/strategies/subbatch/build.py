"""Describe a model, find where to split it, build one rank's part, and check the optimizer."""

from collections.abc import Callable
from contextlib import suppress
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from paceline.core.cutting import with_refused_cuts
from paceline.core.error_lines import blaming
from paceline.core.errors import InvalidInput
from paceline.core.workload import Workload
from paceline.exchange.step import Optimize
from paceline.links.group import Group
from paceline.strategies.subbatch import head
from paceline.strategies.subbatch.config import SubBatch
from paceline.strategies.subbatch.layers import HeadLayer
from paceline.strategies.subbatch.loss import check_objective
from paceline.strategies.subbatch.trainer import SplitModel
from paceline.training.data.batch import Batch, call
from paceline.training.models import describe
from paceline.training.models.chained_head import partition
from paceline.training.models.halves import UNTIE, tied
from paceline.training.models.sharded import Sharding, build_sharded
from paceline.training.recipes.named import tried_with
from paceline.training.recipes.recipe import Recipe

_NUM_STEPS = 3
_ALL, _HALVES = slice(0, 4), (slice(0, 2), slice(2, 4))  # slices of a test weight's four rows


def split(
    build: Callable[[], nn.Module],
    workload: Workload,
    config: SubBatch,
    group: Group,
    seed: int,
    inputs: Any,
    rows_per_sample: int | None = None,
) -> SplitModel:
    """Return this rank's part of the model that `build` makes after `torch.manual_seed(seed)`.

    `workload`: the workload of the rank with the most samples. `inputs`: model inputs for tracing.
    `rows_per_sample`: 1, or the number of tokens per sample; None: derived from the workload.
    Raises InvalidInput if the model cannot be split; the error names the layer.
    """
    try:
        cut = head.cut(workload, config.head, config.workers)
        layers, num_rows = cut.head.layers, rows_per_sample or head.rows_per_sample(cut)
        names = [layer.name for layer in layers]
        shardings = [Sharding.even(head.num_outputs(layer), config.workers) for layer in layers]
        own = {name: one.shard(group.rank) for name, one in zip(names, shardings, strict=True)}
        module = build_sharded(build, own, seed).train().to(group.device)
        inputs = tree_map(lambda leaf: leaf.to(group.device), inputs)
        body, traced = partition(module, names, workload.name, inputs)
    except InvalidInput:
        if why := _tie(build):
            raise InvalidInput("head", f"cannot be split: {why}", hint=UNTIE) from None
        raise
    own_head = (HeadLayer(*one, group.rank) for one in zip(traced, shardings, strict=True))
    return SplitModel(module, body, tuple(own_head), workload.batch_size, num_rows)


def _tie(build: Callable[[], nn.Module]) -> str:
    """Return an error text if a head weight is tied to an embedding; "" if none is."""
    with suppress(Exception), torch.random.fork_rng(devices=[]), torch.device("meta"):
        return tied(build(), None)
    return ""


def describe_recipe(recipe: Recipe, num_samples: int) -> tuple[Workload, int]:
    """Return the workload of `num_samples` samples, and the number of rows (tokens) per sample.

    The model is built on the meta device if it can run there, so that no rank allocates the whole
    head. Raises InvalidInput if the model cannot run, or if its loss is not cross entropy.
    """

    def attempt(model: nn.Module, inputs: Any) -> tuple[Workload, Any]:
        workload = describe(model, inputs, recipe.name)
        with torch.no_grad():
            return workload, call(model.eval(), inputs)

    workload, outputs = tried_with(recipe, attempt, num_samples=num_samples)
    targets = Batch.of(recipe.samples.__getitems__([0])).targets
    check_objective(recipe, outputs[:1] if isinstance(outputs, Tensor) else outputs, targets)
    return workload, prod(outputs.shape[1:-1])


def with_possible_cut(
    model: nn.Module, inputs: Any, workload: Workload, config: SubBatch
) -> Workload:
    """Try to cut the model in two at different layers, until one cut succeeds.

    Returns the workload; `refused_cuts` lists the layers of failed cuts, which `head.cut` skips.

    `inputs`: model inputs of a few samples, on the device of `model`. Raises InvalidInput if the
    model cannot be cut at any layer.
    """

    def attempt(first: str) -> object:
        layers = head.cut(workload, first, config.workers).head.layers
        return partition(model, [layer.name for layer in layers], workload.name, inputs)

    return with_refused_cuts(workload, config, first_of, attempt)


def first_of(workload: Workload, config: SubBatch) -> str:
    """Return the first layer of the head."""
    return head.cut(workload, config.head, config.workers).head.layers[0].name


def check_row_wise(optimizer: Optimize) -> None:
    """Raise InvalidInput if an optimizer does not update each row of a weight independently.

    Updates a random weight and bias once as a whole and once as two halves, and compares both.
    """
    try:
        made, apart = _moves(optimizer, (4, 3), (4,))
    except Exception:  # some optimizers accept only matrices, so try without the bias
        with blaming("optimizer", "cannot update a linear layer"):
            made, apart = _moves(optimizer, (4, 3))
    if apart:
        raise InvalidInput(
            "optimizer",
            "must update each row of a weight independently, because subbatch splits the head",
            got=made,
            hint="use adamw or sgd, or strategy allreduce or host",
        )


def _moves(optimizer: Optimize, *shapes: tuple[int, ...]) -> tuple[str, bool]:
    """Return the optimizer's name, and whether updating halves differs from updating the whole.

    `shapes`: the shapes of the test parameters.
    """
    source = torch.Generator().manual_seed(0)

    def drawn() -> list[Tensor]:
        return [torch.randn(one, generator=source, dtype=torch.float64) for one in shapes]

    before, parts = drawn(), (_ALL, *_HALVES)
    layers = [nn.ParameterList([value[part].clone() for value in before]) for part in parts]
    optimizers = [optimizer(layer) for layer in layers]
    for _ in range(_NUM_STEPS):
        gradients = drawn()
        for layer, part in zip(layers, parts, strict=True):
            for parameter, gradient in zip(layer.parameters(), gradients, strict=True):
                parameter.grad = gradient[part].clone()
        for one in optimizers:
            one.step()
    whole, *halves = ([one.detach() for one in layer.parameters()] for layer in layers)
    moved = [
        (value - start, torch.cat(rows) - start)
        for start, value, *rows in zip(before, whole, *halves, strict=True)
    ]
    apart = any(not torch.allclose(*pair, rtol=1e-6, atol=1e-14) for pair in moved)
    return type(optimizers[0]).__name__, apart
