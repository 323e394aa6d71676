"""The model of a study: its samples, and what a step of so many of them asks of a machine."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

import torch

from paceline.core.errors import InvalidInput
from paceline.core.workload import Workload
from paceline.models import describe, find
from paceline.scale_settings import ScaleSettings


@dataclass(frozen=True)
class Subject:
    """The model's samples, and `workload(n)`: the step of one worker on n of them.

    Of `usual_size` samples it is known that the model takes them.
    """

    shape: tuple[int, ...]
    workload: Callable[[int], Workload]
    usual_size: int

    @property
    def flops(self) -> float:
        """Arithmetic of a step, for each sample."""
        layers = self.workload(self.usual_size).layers
        return sum(one.forward.flops + one.backward.flops for one in layers) / self.usual_size


def subject_of(settings: ScaleSettings) -> Subject:
    """Return the model that the settings name.

    Where it is trained it has as many outputs as the samples have classes, and otherwise the usual
    number. InvalidInput if it cannot be built, its samples are not known, or it fails in forward
    with every batch; a batch with which alone it fails is for the cells to say.
    """
    architecture = find(settings.model)
    shape, usual = settings.input_shape or architecture.input_shape, architecture.input_shape
    if shape is None:
        raise InvalidInput(
            f"input_shape: model {settings.model} does not say it; write for example 3x224x224"
        )
    if settings.trains and usual is not None and shape != usual:
        raise InvalidInput(
            f"input_shape: {settings.model} takes {_text(usual)} where it is trained, not "
            f"{_text(shape)}; a factory of your own, as package.module:factory, takes any"
        )
    classes = settings.classes if settings.trains else None
    with torch.device("meta" if architecture.num_classes else "cpu"):
        model = architecture.build(classes if architecture.num_classes else None).train()
    workload = cache(lambda size: describe(model, torch.zeros(size, *shape), settings.model))
    return Subject(shape, workload, _largest(workload, settings.batch))


def _largest(workload: Callable[[int], Workload], sizes: Sequence[int]) -> int:
    """Return the largest size of which the model takes a step. InvalidInput if it takes none."""
    *larger, smallest = sorted(sizes, reverse=True)
    for size in larger:
        with suppress(InvalidInput):
            workload(size)
            return size
    workload(smallest)
    return smallest


def _text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
