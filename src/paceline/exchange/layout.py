"""Where each gradient lies in a flat buffer: in the order in which rank 0 sees them ready."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from paceline.core.chunks import chunks

_ALIGNMENT = 64  # bytes: a cache line, so that no two gradients share one


@dataclass(frozen=True, eq=False)
class Slot:
    """One parameter's place. `stride` is that of its gradient: the parameter's, if it is dense."""

    index: int
    name: str
    parameter: nn.Parameter
    layer: str
    offset: int

    @cached_property
    def dtype(self) -> torch.dtype:
        """The type of the values that are summed: of a complex gradient, of its two parts."""
        return self.parameter.dtype.to_real()

    @cached_property
    def num_values(self) -> int:
        """How many values of that type there are."""
        return self.parameter.numel() * (2 if self.parameter.is_complex() else 1)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the gradient."""
        return self.parameter.numel() * self.parameter.element_size()

    @cached_property
    def stride(self) -> tuple[int, ...]:
        """Strides of the gradient, in values."""
        return torch.empty_like(self.parameter, device="meta").stride()

    def of(self, buffer: Tensor) -> Tensor:
        """Return this gradient's part of a flat buffer of bytes, in the parameter's shape."""
        flat = buffer[self.offset : self.offset + self.nbytes].view(self.parameter.dtype)
        return flat.as_strided(self.parameter.size(), self.stride)


@dataclass(frozen=True, eq=False)
class Chunk:
    """Gradients that are exchanged together: neighbouring slots."""

    number: int
    slots: tuple[Slot, ...]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the gradients."""
        return sum(slot.nbytes for slot in self.slots)


@dataclass(frozen=True, eq=False)
class Layout:
    """All slots in the order of readiness, layer by layer."""

    slots: tuple[Slot, ...]
    nbytes: int

    @classmethod
    def of(
        cls, parameters: Sequence[tuple[str, str, nn.Parameter]], order: Sequence[int]
    ) -> "Layout":
        """Return the layout of (layer, name, parameter) triples taken in that order.

        A layer stands where its last gradient becomes ready, and its gradients stand together.
        """
        last = {parameters[index][0]: place for place, index in enumerate(order)}
        in_layers = sorted(
            range(len(order)), key=lambda place: (last[parameters[order[place]][0]], place)
        )
        slots, offset = [], 0
        for place in in_layers:
            layer, name, parameter = parameters[order[place]]
            slots.append(Slot(order[place], name, parameter, layer, offset))
            offset += -(-slots[-1].nbytes // _ALIGNMENT) * _ALIGNMENT
        return cls(tuple(slots), offset)

    @property
    def num_flags(self) -> int:
        """How many flags there have to be, so that each slot has that of its index."""
        return 1 + max(slot.index for slot in self.slots)

    @cached_property
    def layers(self) -> tuple[tuple[Slot, ...], ...]:
        """The slots of each layer, in backward order."""
        groups: dict[str, list[Slot]] = {}
        for slot in self.slots:
            groups.setdefault(slot.layer, []).append(slot)
        return tuple(tuple(group) for group in groups.values())

    def chunks(self, size: int) -> tuple[Chunk, ...]:
        """Return the chunks of `size` layers, as section 4.1 of the paper groups them."""
        return tuple(
            Chunk(number, tuple(slot for layer in layers for slot in self.layers[layer]))
            for number, layers in enumerate(chunks(len(self.layers), size))
        )
