"""Try before which layers a model can be cut into body and head."""

from functools import partial
from typing import Any

from torch import nn

from paceline.core.cutting import with_refused_cuts
from paceline.core.workload import Workload
from paceline.strategies.wheel.config import Wheel
from paceline.strategies.wheel.split import split
from paceline.training.models.halves import cut


def with_possible_cut(model: nn.Module, inputs: Any, workload: Workload, config: Wheel) -> Workload:
    """Return the workload such that `split` takes a layer before which the model can be cut.

    `inputs` are those of two or more samples, on the model's device, which may be meta. Raises
    InvalidInput if there is no such layer.
    """
    return with_refused_cuts(workload, config, _first_of, partial(cut, model, inputs))


def _first_of(workload: Workload, config: Wheel) -> str:
    return split(workload, config).first
