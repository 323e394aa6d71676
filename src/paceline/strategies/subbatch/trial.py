"""Try from which layers on a model's head can be split."""

from typing import Any

from torch import nn

from paceline.core.cutting import with_refused_cuts
from paceline.core.workload import Workload
from paceline.strategies.subbatch.config import SubBatch
from paceline.strategies.subbatch.head import cut
from paceline.training.models.chained_head import partition


def with_possible_cut(
    model: nn.Module, inputs: Any, workload: Workload, config: SubBatch
) -> Workload:
    """Return the workload such that `cut` takes a head that can be split.

    `inputs` are those of a few samples, on the model's device, which may be meta. Raises
    InvalidInput if there is no such head.
    """

    def names_from(first: str) -> list[str]:
        return [layer.name for layer in cut(workload, first, config.workers).head]

    return with_refused_cuts(
        workload,
        config,
        lambda described, one: cut(described, one.head, one.workers).head[0].name,
        lambda first: partition(model, names_from(first), workload.name, inputs),
    )
