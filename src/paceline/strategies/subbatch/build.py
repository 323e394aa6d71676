"""Describe a recipe's model, find a cut, and build one rank's part."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from paceline.core.cutting import with_refused_cuts
from paceline.core.errors import InvalidInput
from paceline.core.workload import Workload
from paceline.links.group import Group
from paceline.strategies.subbatch import head
from paceline.strategies.subbatch.config import SubBatch
from paceline.strategies.subbatch.layers import HeadLayer
from paceline.strategies.subbatch.loss import check_objective
from paceline.strategies.subbatch.trainer import SplitModel
from paceline.training.data.batch import Batch, call
from paceline.training.models import describe
from paceline.training.models.chained_head import partition
from paceline.training.models.sharded import Sharding, build_sharded
from paceline.training.recipes.recipe import Recipe


def split(
    build: Callable[[], nn.Module],
    workload: Workload,
    config: SubBatch,
    group: Group,
    seed: int,
    inputs: Any = None,
    rows_per_sample: int | None = None,
) -> SplitModel:
    """Return this rank's part of the model that `build` makes after `torch.manual_seed(seed)`.

    `workload`: the largest rank's part of a step. `inputs`: of some samples. `rows_per_sample`: by
    default as in the workload. InvalidInput with the layer that prevents the split.
    """
    try:
        cut = head.cut(workload, config.head, config.workers)
        layers, num_rows = cut.head, rows_per_sample or cut.rows_per_sample
        names = [layer.name for layer in layers]
        shardings = [Sharding.even(head.num_outputs(layer), config.workers) for layer in layers]
        own = {name: one.shard(group.rank) for name, one in zip(names, shardings, strict=True)}
        module = build_sharded(build, own, seed).train().to(group.device)
        if inputs is not None:
            inputs = tree_map(lambda leaf: leaf.to(group.device), inputs)
        body, traced = partition(module, names, workload.name, inputs)
    except InvalidInput as error:
        raise _of_tied(build, workload.name) or error from None
    if num_rows > 1:
        for layer in traced:
            if isinstance(layer.module, nn.BatchNorm1d):
                raise InvalidInput(
                    "head",
                    f"cannot split BatchNorm1d {layer.name!r} of {workload.name} by tokens",
                    hint="choose a head that begins after it",
                )
    own_head = (HeadLayer(*one, group.rank) for one in zip(traced, shardings, strict=True))
    return SplitModel(module, body, tuple(own_head), workload.batch_size, num_rows)


def _of_tied(build: Callable[[], nn.Module], name: str) -> InvalidInput | None:
    """Return the error for a model whose output layer shares an embedding's weight, if it does."""
    owners: dict[int, dict[type, str]] = {}
    with suppress(Exception), torch.random.fork_rng(devices=[]), torch.device("meta"):
        model = build()
        for key, parameter in model.named_parameters(remove_duplicate=False):
            layer = model.get_submodule(key.rpartition(".")[0])
            owners.setdefault(id(parameter), {})[type(layer)] = key
        for own in owners.values():
            if nn.Linear in own and nn.Embedding in own:
                return InvalidInput(
                    "head",
                    f"cannot split {own[nn.Linear]} of {name}, which is tied to "
                    f"{own[nn.Embedding]} in the body",
                    hint="untie it, as in gpt-untied, or use strategy allreduce or host",
                )
    return None


@dataclass(frozen=True)
class Described:
    """The largest rank's part of a step, and the outputs, without values."""

    workload: Workload
    outputs: Any

    @property
    def rows_per_sample(self) -> int:
        """The rows of a sample: 1, or the number of its tokens."""
        return prod(self.outputs.shape[1:-1])


def describe_recipe(recipe: Recipe, num_samples: int) -> Described:
    """Describe a step, without allocating the model if possible, so that no rank has a whole head.

    InvalidInput if the model cannot run, or if its loss is not cross entropy of its outputs.
    """
    with torch.random.fork_rng(devices=[]):
        try:
            found = _described(recipe, num_samples, "meta")
        except Exception:  # the model needs its values
            found = _described(recipe, num_samples, "cpu")
    targets = Batch.of(recipe.samples.__getitems__([0])).targets
    outputs = found.outputs
    check_objective(recipe, outputs[:1] if isinstance(outputs, Tensor) else outputs, targets)
    return found


def _described(recipe: Recipe, num_samples: int, device: str) -> Described:
    inputs = recipe.example(num_samples)
    with torch.device(device):
        model = recipe.model()
    if not isinstance(model, nn.Module):
        raise InvalidInput("model", f"is a {type(model).__name__}, not a Module", got=recipe.name)
    model.train()
    workload = describe(model, inputs, recipe.name)
    inputs = tree_map(lambda leaf: leaf.to(device), inputs)
    with torch.no_grad(), torch.device(device):
        return Described(workload, call(model.eval(), inputs))


def with_possible_cut(
    model: nn.Module, inputs: Any, workload: Workload, config: SubBatch
) -> Workload:
    """Mark cuts at which the model cannot be split, so that `head.cut` finds another one.

    `inputs`: of a few samples, on the model's device, which may be meta. InvalidInput if no head
    can be split.
    """

    def names_from(first: str) -> list[str]:
        return [layer.name for layer in head.cut(workload, first, config.workers).head]

    return with_refused_cuts(
        workload,
        config,
        lambda described, one: head.cut(described, one.head, one.workers).head[0].name,
        lambda first: partition(model, names_from(first), workload.name, inputs),
    )
