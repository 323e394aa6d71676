"""Find the layers at which a model can be cut into body and head."""

from functools import partial
from typing import Any

from torch import nn

from paceline.core.cutting import with_refused_cuts
from paceline.core.workload import Workload
from paceline.strategies.wheel.config import Wheel
from paceline.strategies.wheel.split import split
from paceline.training.models.halves import cut


def with_possible_cut(model: nn.Module, inputs: Any, workload: Workload, config: Wheel) -> Workload:
    """Try cuts until a cut succeeds; return the workload with the failed cuts (`refused_cuts`).

    `inputs`: a batch of at least two samples, on the model's device (meta is allowed).
    Raises InvalidInput if no cut is possible.
    """
    attempt = partial(cut, model, inputs)
    return with_refused_cuts(workload, config, lambda *own: split(*own).first, attempt)
