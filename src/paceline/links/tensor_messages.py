"""Send named tensors of checkpoints to rank 0, and from rank 0 to all ranks."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.links.group import Group

Tensors = dict[str, Tensor]
Spec = list[tuple[str, str, list[int]]]  # name, dtype, shape


def gather_tensors(tensors: Mapping[str, Tensor], group: Group) -> list[Tensors]:
    """Return every rank's tensors on rank 0, in host memory; return [] on other ranks."""
    own = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    specs: list[Spec] = group.gather(spec_of(own))
    if group.rank != 0:
        with group.naming_lost_ranks():
            for tensor in own.values():
                dist.send(bytes_of(tensor), group=group.control, group_dst=0)
        return []
    found = [own]
    for rank, spec in enumerate(specs[1:], 1):
        received = {name: empty_of(dtype, shape) for name, dtype, shape in spec}
        with group.naming_lost_ranks():
            for tensor in received.values():
                dist.recv(bytes_of(tensor), group=group.control, group_src=rank)
        found.append(received)
    return found


def broadcast_tensors(tensors: Mapping[str, Tensor], group: Group) -> Tensors:
    """Return rank 0's tensors on all ranks, in host memory; other ranks' `tensors` are ignored."""
    own = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    spec: Spec = group.gather(spec_of(own) if group.rank == 0 else [])[0]
    if group.rank != 0:
        own = {name: empty_of(dtype, shape) for name, dtype, shape in spec}
    if group.world_size > 1:
        with group.naming_lost_ranks():
            for name, _, _ in spec:
                dist.broadcast(bytes_of(own[name]), group=group.control, group_src=0)
    return own


def spec_of(tensors: Tensors) -> Spec:
    """Return the tensors' names, dtypes and shapes, from which a receiver allocates tensors."""
    return [
        (name, str(one.dtype).removeprefix("torch."), list(one.shape))
        for name, one in tensors.items()
    ]


def empty_of(dtype: str, shape: list[int]) -> Tensor:
    """Allocate a tensor with this dtype and shape."""
    return torch.empty(shape, dtype=getattr(torch, dtype))


def bytes_of(tensor: Tensor) -> Tensor:
    """View a tensor as bytes, because gloo cannot send all dtypes."""
    return tensor.reshape(-1).view(torch.uint8)
