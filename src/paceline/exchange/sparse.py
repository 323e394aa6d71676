"""Sparse gradients: those of embeddings of which a batch touches a few rows."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.core.errors import InvalidInput
from paceline.links.group import Group


class SparseGradients:
    """Makes sparse gradients their mean over all ranks, after backward, by torch's all-reduce.

    `parameters` are pairs of a parameter's index among all and the parameter. A gradient that has
    changed on no rank stays as it is.
    """

    def __init__(self, parameters: Sequence[tuple[int, nn.Parameter]], group: Group) -> None:
        self._parameters, self._group = tuple(parameters), group

    @torch.no_grad()
    def exchange(self, touched: Sequence[bool]) -> None:
        """Exchange what has changed on any rank; all ranks call it together."""
        if not self._parameters:
            return
        flags = torch.tensor([int(touched[index]) for index, _ in self._parameters])
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group.control)
        for (_, parameter), changed in zip(self._parameters, flags.tolist(), strict=True):
            if changed:
                gradient = _coalesced(parameter)
                dist.all_reduce(gradient, group=self._group.process_group)
                parameter.grad = gradient / self._group.world_size


def _coalesced(parameter: nn.Parameter) -> Tensor:
    gradient = parameter.grad
    if gradient is None:
        return torch.sparse_coo_tensor(
            torch.empty(1, 0, dtype=torch.int64, device=parameter.device),
            parameter.new_empty(0, *parameter.shape[1:]),
            parameter.shape,
            is_coalesced=True,
        )
    if gradient.layout == torch.strided:
        raise InvalidInput(
            "gradient of an embedding with sparse=True: is dense, because its weight is used "
            "elsewhere, too; use sparse=False"
        )
    return gradient.coalesce()
