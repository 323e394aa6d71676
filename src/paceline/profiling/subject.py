"""What is profiled: a model, its data, and a rank's part of a step."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from paceline.core.errors import InvalidInput
from paceline.core.workload import Workload
from paceline.data import Dataset, ShardedBatches, loader
from paceline.links.group import Group
from paceline.models import describe, find
from paceline.profile_settings import SYNTHETIC, ProfileSettings
from paceline.training.fitted import Fitted, fitted
from paceline.training.step import Share, shares

_STEPS_AN_EPOCH = 4
_LEAST_SAMPLES = 40  # of ten classes


@dataclass(frozen=True)
class Subject:
    """A model and its data on one rank; `workload` describes the rank's part of a step."""

    model: nn.Module
    data: Dataset
    batches: ShardedBatches
    workload: Workload

    def source(self, device: torch.device) -> Iterator[Share]:
        """Yield this rank's part of each step, without end."""
        batches = loader(self.data.train, self.batches)
        while True:
            yield from shares(self.batches, batches, device)


def fitted_to(settings: ProfileSettings) -> Fitted:
    """Return the model and the data: those asked for, or synthetic ones that make whole batches."""
    spec = settings.data
    if spec == SYNTHETIC:
        steps = max(_STEPS_AN_EPOCH, -(-_LEAST_SAMPLES // settings.batch_size))
        samples = f"samples={steps * settings.batch_size}"
        spec = f"{SYNTHETIC}:{','.join([*_shape_of(settings.model), samples])}"
    return fitted(settings.model, spec, settings.seed)


def _shape_of(model: str) -> Iterator[str]:
    shape = None if ":" in model else find(model).input_shape
    if shape is not None:
        yield "x".join(map(str, shape))


def subject_of(settings: ProfileSettings, group: Group) -> Subject:
    """Load the data, build the model for it, and describe it. InvalidInput if they do not fit."""
    if group.world_size != settings.workers:
        raise InvalidInput(f"workers: {settings.workers} asked for, {group.world_size} started")
    model, data, *_ = fitted_to(settings)
    samples, size = len(data.train), settings.batch_size
    if size > samples:
        raise InvalidInput(
            f"batch_size: {size} samples a step, but {data.name} has {samples} for training"
        )
    batches = ShardedBatches(samples, size, group.rank, group.world_size, settings.seed)
    inputs = torch.zeros(-(-size // settings.workers), *data.sample_shape)
    workload = describe(model, inputs, settings.model)
    return Subject(model.to(group.device), data, batches, workload)
