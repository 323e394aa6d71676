"""Tensors by name, sent between ranks for checkpoints: to rank 0, and from it."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.links.group import Group

Tensors = dict[str, Tensor]
_Spec = list[tuple[str, str, list[int]]]  # name, type, shape


def gather_tensors(tensors: Mapping[str, Tensor], group: Group) -> list[Tensors]:
    """Return every rank's tensors on rank 0, in host memory and in rank order; [] on the others."""
    own = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    specs: list[_Spec] = group.gather(_spec(own))
    if group.rank != 0:
        with group.naming_lost_ranks():
            for tensor in own.values():
                dist.send(_bytes(tensor), group=group.control, group_dst=0)
        return []
    found = [own]
    for rank, spec in enumerate(specs[1:], 1):
        received = {name: _empty(dtype, shape) for name, dtype, shape in spec}
        with group.naming_lost_ranks():
            for tensor in received.values():
                dist.recv(_bytes(tensor), group=group.control, group_src=rank)
        found.append(received)
    return found


def broadcast_tensors(tensors: Mapping[str, Tensor], group: Group) -> Tensors:
    """Return rank 0's tensors on all ranks, in host memory; the others' arguments do not count."""
    own = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    spec: _Spec = group.gather(_spec(own) if group.rank == 0 else [])[0]
    if group.rank != 0:
        own = {name: _empty(dtype, shape) for name, dtype, shape in spec}
    if group.world_size > 1:
        with group.naming_lost_ranks():
            for name, _, _ in spec:
                dist.broadcast(_bytes(own[name]), group=group.control, group_src=0)
    return own


def _spec(tensors: Tensors) -> _Spec:
    return [
        (name, str(one.dtype).removeprefix("torch."), list(one.shape))
        for name, one in tensors.items()
    ]


def _empty(dtype: str, shape: list[int]) -> Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype))


def _bytes(tensor: Tensor) -> Tensor:
    # As bytes, for gloo does not send all types.
    return tensor.reshape(-1).view(torch.uint8)
