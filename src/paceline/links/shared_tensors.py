"""Tensors in memory that processes share, of which nothing can be left."""

import mmap
import os
from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple, Self

import torch
from torch import Tensor

from paceline.links.shared_memory import allocate

_ALIGNMENT = 64  # a cache line: neighbours are not slowed down by each other's writers


class Entry(NamedTuple):
    """Where a tensor lies: its name, torch's name of its type, its shape, and its first byte."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


class SharedTensors:
    """Named tensors in anonymous memory of mode 0600, which goes with its last user.

    `fd` is the descriptor that other processes attach by; `memory` is all of it, as bytes.
    """

    def __init__(self, fd: int, entries: Sequence[Entry]) -> None:
        self.fd, self.entries = fd, tuple(entries)
        self.memory = torch.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size), dtype=torch.uint8)
        self.tensors = {entry.name: self._view(entry) for entry in self.entries}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], what: str) -> Self:
        """Return copies of the tensors in new memory.

        InvalidInput, which says `what` they are, if the machine does not give so much.
        """
        entries, offset = [], 0
        for name, tensor in tensors.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            entries.append(Entry(name, dtype, tuple(tensor.shape), offset))
            offset += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        shared = cls(allocate(max(1, offset), what), entries)
        for name, tensor in tensors.items():
            shared.tensors[name].copy_(tensor.detach())
        return shared

    def _view(self, entry: Entry) -> Tensor:
        dtype: torch.dtype = getattr(torch, entry.dtype)
        nbytes = prod(entry.shape) * dtype.itemsize
        return self.memory[entry.offset : entry.offset + nbytes].view(dtype).view(entry.shape)

    def close(self) -> None:
        """Close the descriptor; the memory stays as long as tensors look at it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
