"""Stand-ins of a rehearsal: every process makes the same ones from the run's `RunSpec`."""

import torch
from torch import nn

from paceline.codecs.stand_ins import stand_ins_for
from paceline.strategies.wheel.config import RunSpec, Wheel
from paceline.strategies.wheel.split import split
from paceline.training.data.dataset import TensorSamples
from paceline.training.models.halves import Halves
from paceline.training.models.paced_halves import PacedWhole, paced_halves
from paceline.training.recipes.named import workload_of
from paceline.training.recipes.recipe import Recipe


def paced_recipe(spec: RunSpec) -> Recipe:
    """Return the recipe of a rehearsal: samples without values, with targets of the real size."""
    assert spec.pace is not None
    num_samples = spec.num_steps * spec.batch_size
    inputs = torch.zeros(1, 1).expand(num_samples, -1)
    targets = torch.zeros(1, spec.pace.target_nbytes, dtype=torch.uint8).expand(num_samples, -1)
    return Recipe(
        name=spec.model,
        model=nn.Module,
        train=TensorSamples(inputs, targets),
        loss=lambda scores, _: scores.mean(),
    )


def stand_in(spec: RunSpec) -> tuple[PacedWhole, Halves]:
    """Return the same stand-ins in every process; InvalidInput if the model cannot be paced."""
    pace = spec.pace
    assert pace is not None
    workload = workload_of(spec.model, pace.samples, pace.input_shape)
    parts = split(workload, Wheel(head=spec.head))
    times = pace.forward_s, pace.backward_s, pace.update_s
    like = stand_ins_for(spec.config.gradients)
    return paced_halves(parts.body, parts.head, *times, gradient_like=like)
