"""Check that all ranks have the same model, and place gradients in a flat buffer."""

import hashlib
import json
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, zip_longest
from operator import attrgetter
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.core.chunks import chunks
from paceline.core.errors import InvalidInput
from paceline.links.group import Group
from paceline.training.models.layers import layers_of

# dtypes of gradients that all-reduce, host and tree exchanges can sum
_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_ALIGNMENT = 64  # bytes of a cache line; no two gradients may share a cache line


class NamedParameter(NamedTuple):
    """A parameter with its name and its layer's name."""

    layer: str
    name: str
    parameter: nn.Parameter


def trainable(module: nn.Module, parameters: Iterable[nn.Parameter]) -> list[NamedParameter]:
    """Return `parameters` with their names and layers, in the order of the module's layers."""
    own = {id(parameter) for parameter in parameters}
    return [
        NamedParameter(layer.name, name, parameter)
        for layer in layers_of(module)
        for name, parameter in layer.parameters
        if id(parameter) in own
    ]


def check_exchangeable(parameters: Sequence[NamedParameter], device: torch.device) -> None:
    """Raise InvalidInput if a parameter has an unsupported dtype, or is not on `device`."""
    for _, name, parameter in parameters:
        if parameter.dtype.to_real() not in _TYPES:
            problem = "must be float32, float64, bfloat16, float16 or complex"
            raise InvalidInput(f"parameter {name!r}", problem, got=parameter.dtype)
        if parameter.device.type != device.type:
            problem, got = f"must be on {device}, this rank's device", str(parameter.device)
            raise InvalidInput(f"parameter {name!r}", problem, got=got, hint="use module.to(...)")


class ModelsDiffer(InvalidInput, RuntimeError):
    """Ranks have different models; as in DistributedDataParallel, this is a RuntimeError."""


def check_same(
    module: nn.Module, group: Group, ignored: Container[str] = (), with_buffers: bool = True
) -> None:
    """Raise ModelsDiffer on all ranks if their models have different tensors; collective.

    Names, shapes, dtypes, strides and `requires_grad` are compared; values are not. Buffers are
    compared only if `with_buffers`. Tensors whose names are in `ignored` may differ.
    """
    named = [(name, p) for name, p in module.named_parameters() if name not in ignored]
    rows = [_described("trainable parameter", name, p) for name, p in named if p.requires_grad]
    rows += [_described("frozen parameter", name, p) for name, p in named if not p.requires_grad]
    if with_buffers:
        buffers = [(name, b) for name, b in module.named_buffers() if name not in ignored]
        rows += [_described("buffer", name, buffer) for name, buffer in buffers]
    # compare hashes first, because exchanging a large model's descriptions takes long
    digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    if len(set(group.gather(digest))) == 1:
        return
    first, *others = group.gather(rows)
    for rank, other in enumerate(others, start=1):
        for place, (one, two) in enumerate(zip_longest(first, other, fillvalue="missing")):
            if one != two:
                tensors = f"tensor {place} is {one} on rank 0, and {two} on rank {rank}"
                raise ModelsDiffer("module", f"must be equal on all ranks: {tensors}")


def _described(kind: str, name: str, tensor: Tensor) -> str:
    strides = list(tensor.stride()) if tensor.layout == torch.strided else []
    return (
        f"the {kind} {name!r} of shape {list(tensor.shape)}, type {tensor.dtype} and strides "
        f"{strides}"
    )


def check_same_codec(codec: str | None, group: Group) -> None:
    """Raise InvalidInput on all ranks if they have codecs of different names; collective."""
    names = group.gather(codec)
    if len(set(names)) > 1:
        got = sorted({str(one) for one in names})
        raise InvalidInput("codec", "must be equal on all ranks", got=got)


@dataclass(frozen=True, eq=False)
class Slot:
    """The place of a parameter's gradient in a flat buffer, from byte `offset` on.

    `index`: the parameter's position in the list of trainable parameters.
    """

    index: int
    name: str
    parameter: nn.Parameter
    layer: str
    offset: int

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype in which values are summed; a complex value is summed as two real values."""
        return self.parameter.dtype.to_real()

    @cached_property
    def num_values(self) -> int:
        """Number of real values to sum; a complex value counts as two."""
        return self.parameter.numel() * (2 if self.parameter.is_complex() else 1)

    @cached_property
    def nbytes(self) -> int:
        """Size of the gradient in bytes."""
        return self.parameter.nbytes

    @cached_property
    def stride(self) -> tuple[int, ...]:
        """Strides of the gradient, in elements."""
        return torch.empty_like(self.parameter, device="meta").stride()

    def of(self, buffer: Tensor) -> Tensor:
        """Return this slot of flat byte tensor `buffer`, as a view with the parameter's shape."""
        # the view has the gradient's strides, to preserve layouts such as channels_last
        flat = buffer[self.offset : self.offset + self.nbytes].view(self.parameter.dtype)
        return flat.as_strided(self.parameter.size(), self.stride)


@dataclass(frozen=True, eq=False)
class Chunk:
    """Adjacent layers whose gradients are exchanged together."""

    number: int
    slots: tuple[Slot, ...]

    @cached_property
    def nbytes(self) -> int:
        """Total size of the chunk's gradients, in bytes."""
        return sum(slot.nbytes for slot in self.slots)


@dataclass(frozen=True, eq=False)
class Layout:
    """Places of all gradients in a flat buffer of `nbytes` bytes, grouped by layer.

    Layers are sorted by when their last gradient is ready.
    """

    slots: tuple[Slot, ...]
    nbytes: int

    @classmethod
    def of(cls, parameters: Sequence[NamedParameter], order: Sequence[int]) -> "Layout":
        """Place gradients; `order`: parameter indices in the order in which gradients get ready."""
        last = {parameters[index].layer: place for place, index in enumerate(order)}
        slots, offset = [], 0
        # the sort is stable: within a layer, gradients stay in the order in which they get ready
        for index in sorted(order, key=lambda index: last[parameters[index].layer]):
            layer, name, parameter = parameters[index]
            slots.append(Slot(index, name, parameter, layer, offset))
            offset += -(-slots[-1].nbytes // _ALIGNMENT) * _ALIGNMENT
        return cls(tuple(slots), offset)

    @property
    def num_flags(self) -> int:
        """Length of an array that has one flag per parameter, at `slot.index`."""
        return 1 + max(slot.index for slot in self.slots)

    @cached_property
    def layers(self) -> tuple[tuple[Slot, ...], ...]:
        """The slots of each layer; layers are sorted by when their last gradient is ready."""
        return tuple(tuple(group) for _, group in groupby(self.slots, attrgetter("layer")))

    def chunks(self, size: int) -> tuple[Chunk, ...]:
        """Group adjacent layers into chunks of `size` layers, as in Le et al. 2018, section 4.1."""
        return tuple(
            Chunk(number, tuple(slot for layer in layers for slot in self.layers[layer]))
            for number, layers in enumerate(chunks(len(self.layers), size))
        )


@torch.no_grad()
def exchange_sparse(
    parameters: Sequence[nn.Parameter], touched: Sequence[bool], group: Group
) -> None:
    """Average the sparse gradients that changed on any rank; collective.

    `touched`: by parameter, whether its gradient changed on this rank.
    """
    # all ranks must call the same collectives, so they first agree which gradients to average
    flags = torch.tensor(touched, dtype=torch.int64)
    dist.all_reduce(flags, dist.ReduceOp.MAX, group=group.control)
    for parameter, changed in zip(parameters, flags.tolist(), strict=True):
        if not changed:
            continue
        gradient = parameter.grad
        if gradient is None:
            # only other ranks have this gradient; this rank joins their all-reduce without rows
            places = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
            rows = parameter.new_empty(0, *parameter.shape[1:])
            gradient = torch.sparse_coo_tensor(places, rows, parameter.shape, is_coalesced=True)
        if gradient.layout == torch.strided:
            problem = "cannot be True for an embedding that shares its weight with another layer"
            raise InvalidInput("sparse", problem, hint="use sparse=False")
        gradient = gradient.coalesce()
        dist.all_reduce(gradient, group=group.process_group)
        parameter.grad = gradient / group.world_size
