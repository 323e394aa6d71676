"""The workload of a model that is named."""

import torch
from torch import nn

from paceline.core.errors import InvalidInput
from paceline.core.workload import Workload
from paceline.models.describe import describe
from paceline.models.factory import find


def workload_of(
    model: str | nn.Module, batch_size: int, input_shape: tuple[int, ...] | None
) -> Workload:
    """Describe a step of a model, or of the one that `find` has under that name.

    `input_shape` is that of one sample; built-in models know theirs. InvalidInput if it is not
    known, or does not fit.
    """
    if isinstance(model, nn.Module):
        name, built, shape = type(model).__name__, model, input_shape
    else:
        architecture = find(model)
        name, shape = model, input_shape or architecture.input_shape
        # A factory of the user's may compute with the tensors that it makes.
        with torch.device("meta" if architecture.num_classes else "cpu"):
            built = architecture.build(None)
    if shape is None:
        raise InvalidInput(
            f"input_shape: model {name} does not say it; write for example 3x224x224"
        )
    return describe(built, torch.zeros(batch_size, *shape), name)
