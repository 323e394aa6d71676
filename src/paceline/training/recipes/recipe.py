"""The recipe: model, data, loss, score, optimizer and schedule of a training run."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import default_collate

from paceline.core.error_lines import blamed, blaming
from paceline.core.errors import InvalidInput
from paceline.training.data.batch import Batch, MapDataset, batches_of, call
from paceline.training.data.dataset import IndexedSamples
from paceline.training.models.layers import require_trainable
from paceline.training.recipes.losses import check_classes

Loss = Callable[[Any, Any], Tensor]
OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]
ScheduleFactory = Callable[[Optimizer, int], LRScheduler]
NAMELESS = "the recipe"  # name of a nameless recipe in errors


@dataclass(frozen=True, eq=False, kw_only=True)
class Recipe:
    """Defines a training run: model, data, loss, score, optimizer and schedule.

    `model()` builds a new model, after torch's random numbers are seeded. `train` and `test` are
    map-style data sets. `loss(outputs, targets)` and `score(outputs, targets)` return a 0-d tensor,
    the mean over a batch's samples. `optimizer(parameters)` and `schedule(optimizer, num_steps)`
    are defaults, which the run's settings can override. `collate` makes a batch from a list of
    samples. `num_classes`: number of classes, if targets are class numbers. `name` is used in
    messages.
    """

    model: Callable[[], nn.Module]
    train: MapDataset
    loss: Loss
    test: MapDataset | None = None
    score: Loss | None = None
    optimizer: OptimizerFactory | None = None
    schedule: ScheduleFactory | None = None
    collate: Callable[[list[Any]], Any] = default_collate
    num_classes: int | None = None
    name: str = ""
    samples: IndexedSamples = field(init=False)
    test_samples: IndexedSamples | None = field(init=False)

    def __post_init__(self) -> None:
        """Set `samples`, `test_samples`; raise InvalidInput for an unusable data set."""
        name = self.name or NAMELESS
        object.__setattr__(self, "samples", batches_of(self.train, self.collate, name))
        tested = None if self.test is None else batches_of(self.test, self.collate, name)
        object.__setattr__(self, "test_samples", tested)

    @property
    def score_name(self) -> str:
        """The name of the score function; "score" for a lambda; "loss" if there is no score."""
        if self.score is None:
            return "loss"
        name = getattr(self.score, "__name__", type(self.score).__name__)
        is_named = name not in ("<lambda>", "partial")
        return name.replace("_", " ") if is_named else "score"

    def first(self, num_samples: int) -> Batch:
        """Return a batch that repeats the first sample `num_samples` times."""
        first = self.samples.__getitems__([0])
        repeated = tree_map(lambda leaf: leaf.expand(num_samples, *leaf.shape[1:]).clone(), first)
        return Batch.of(repeated)

    def example(self, num_samples: int) -> Any:
        """Return the inputs of a batch that repeats the first sample `num_samples` times."""
        return self.first(num_samples).inputs

    def target_nbytes(self, num_samples: int) -> int | None:
        """Return the bytes of `num_samples` targets; None for class numbers, as in `Workload`."""
        leaves = tree_leaves(self.first(1).targets)
        kinds = [(leaf.ndim, leaf.dtype) for leaf in leaves]
        if self.num_classes is not None and kinds == [(1, torch.int64)]:
            return None
        return num_samples * sum(int(leaf.nbytes) for leaf in leaves)

    @cached_property
    def tokens_per_sample(self) -> int | None:
        """The number of tokens in a sample; None if inputs are not vectors of integers."""
        first = tree_leaves(self.example(1))[0]
        is_tokens = first.ndim == 2 and not (first.is_floating_point() or first.is_complex())
        return first.shape[1] if is_tokens else None


def new_model(recipe: Recipe) -> nn.Module:
    """Build the recipe's model; raise InvalidInput if the build fails or nothing is trainable."""
    with blaming(recipe.name, "building the model failed"):
        model = recipe.model()
    return require_trainable(recipe.name, model)


@torch.no_grad()
def built(recipe: Recipe, seed: int) -> nn.Module:
    """Build the recipe's model after `torch.manual_seed(seed)`; return it in training mode.

    Raises InvalidInput if nothing is trainable, or if model, loss or score fail on a sample.
    """
    torch.manual_seed(seed)
    model = new_model(recipe).eval()
    check_fit(recipe, model, recipe.samples, "train")
    if recipe.test_samples is not None:
        check_fit(recipe, model, recipe.test_samples, "test")
    return model.train()


def check_fit(recipe: Recipe, model: nn.Module, samples: IndexedSamples, part: str) -> None:
    """Raise InvalidInput if model, loss or score fail on the first sample.

    `part`: "train" or "test", for errors.
    """
    device = next(model.parameters()).device
    inputs, targets = Batch.of(samples.__getitems__([0])).to(device)
    try:
        outputs = call(model, inputs)
    except Exception as error:
        raise InvalidInput(
            f"model {recipe.name}",
            f"fails on the first {part} sample ({described(inputs)}): {blamed(error)}",
        ) from error
    if recipe.num_classes is not None and targets.dtype != torch.bool:  # bool: several labels
        check_classes(recipe.name, outputs, targets, recipe.num_classes)
    for what, function in (("loss", recipe.loss), ("score", recipe.score)):
        if function is not None:
            scalar_of(f"{what} of {recipe.name}", function, outputs, targets)


def scalar_of(what: str, function: Loss, outputs: Any, targets: Any) -> Tensor:
    """Compute a loss or score; raise InvalidInput if the result is not a floating-point scalar.

    `what`: name of the loss or score in errors.
    """
    try:
        value = function(outputs, targets)
    except torch.OutOfMemoryError:  # not a fault of the loss or score
        raise
    except Exception as error:
        raise InvalidInput(
            what,
            f"fails on outputs {described(outputs)} and targets {described(targets)}: "
            f"{blamed(error)}",
        ) from error
    if not isinstance(value, Tensor) or value.ndim or not value.is_floating_point():
        problem = "must be a 0-d floating-point tensor, the mean over the samples"
        raise InvalidInput(what, f"{problem}, not {described(value)}")
    return value


def learnable_loss(name: str, loss: Loss, outputs: Any, targets: Any) -> Tensor:
    """Compute a recipe's loss; raise InvalidInput if the loss does not depend on the model.

    `name`: name of the recipe in errors.
    """
    value = scalar_of(f"loss of {name}", loss, outputs, targets)
    if not value.requires_grad:
        hint = "compute it from the outputs, without detach or torch.no_grad"
        raise InvalidInput(
            f"loss of {name}", "does not depend on the model's parameters", hint=hint
        )
    return value


def described(value: Any) -> str:
    """Return the types and shapes of a pytree's leaves as text, such as "(float32 2x3, int)"."""
    if isinstance(value, Tensor):
        shape = "x".join(map(str, value.shape)) or "scalar"
        return f"{str(value.dtype).removeprefix('torch.')} {shape}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {described(one)}" for key, one in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "(" + ", ".join(map(described, value)) + ")"
    return type(value).__name__
