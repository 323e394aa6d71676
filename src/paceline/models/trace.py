"""The cost of all operations of a training step, and the tensors that go from layer to layer."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.models.alive import Alive, workspace_nbytes
from paceline.models.flops import allocates, flops_of, nbytes_of, stored_nbytes, tensors_in

Counts = tuple[int, int, int]  # operations, bytes, calls
_Slice = tuple[StorageWeakRef, int, tuple[int, ...]]


class HandOver:
    """Finds what each segment of a forward pass hands on: made in it and read after it.

    In a chain of layers that is the one tensor between two neighbours. Around a branch a tensor
    counts where it was made, once, however many segments read it. A tensor changed in place counts
    as made by the last segment that changed it.

    Once `in_backward` is set, it finds what of each segment is kept until then: the storages that
    backward reads.
    """

    def __init__(self) -> None:
        self.segment = 0
        self.in_backward = False
        self._maker: dict[StorageWeakRef, int] = {}
        self._read: dict[int, dict[_Slice, tuple[int, int]]] = defaultdict(dict)
        self._kept: dict[int, dict[StorageWeakRef, int]] = defaultdict(dict)

    def read(self, tensors: Sequence[Tensor], outside: bool = False) -> None:
        """Note that the current segment, or what comes after the model, reads `tensors`."""
        for tensor in tensors:
            storage = _storage_of(tensor)
            maker = None if storage is None else self._maker.get(storage)
            if storage is None or maker is None:
                continue
            if self.in_backward:
                self._kept[maker][storage] = tensor.untyped_storage().nbytes()
            elif outside or maker < self.segment:
                part = (storage, int(tensor.storage_offset()), tuple(tensor.shape))
                limit = tensor.untyped_storage().nbytes()
                self._read[maker][part] = (stored_nbytes(tensor), limit)

    def made(self, tensors: Sequence[Tensor]) -> None:
        """Note that the current segment made `tensors`; what backward makes is not kept for it."""
        for tensor in () if self.in_backward else tensors:
            storage = _storage_of(tensor)
            if storage is not None:
                self._maker[storage] = self.segment

    def nbytes(self, segment: int) -> int:
        """Bytes that `segment` hands on: no more of a storage than there is, however many views."""
        sizes: dict[StorageWeakRef, int] = defaultdict(int)
        for (storage, _, _), (nbytes, limit) in self._read[segment].items():
            sizes[storage] = min(limit, sizes[storage] + nbytes)
        return sum(sizes.values())

    def kept_nbytes(self, segment: int) -> int:
        """Bytes that `segment` made and backward read."""
        return sum(self._kept[segment].values())


class CostCounter(TorchDispatchMode):
    """Adds up the arithmetic, traffic and number of all operations run while it is active."""

    def __init__(self, hand_over: HandOver | None = None, alive: Alive | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._flops = self._nbytes = self._num_calls = 0
        self._hand_over = hand_over
        self._alive = alive

    @property
    def counts(self) -> Counts:
        """What ran so far. Views and allocations do no work and are left out."""
        return self._flops, self._nbytes, self._num_calls

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operation and count it."""
        kwargs = kwargs or {}
        inputs = list(tensors_in((args, kwargs)))
        out = func(*args, **kwargs)
        outputs = list(tensors_in(out))
        changes = func._schema.is_mutable and torch.Tag.inplace_view not in func.tags
        view = not changes and _all_alias(outputs, inputs)
        if not view:
            self._flops += flops_of(func, args, kwargs, out)
            self._nbytes += nbytes_of(func, inputs, outputs)
            self._num_calls += not allocates(func)
        if self._hand_over is not None:
            self._hand_over.read(inputs)
            if not view:
                self._hand_over.made(outputs)
                self._count_alive(func, args, outputs, inputs)
        return out

    def _count_alive(
        self,
        func: OpOverload,
        args: Sequence[Any],
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
    ) -> None:
        if self._alive is None:
            return
        self._alive.made(outputs, inputs)
        # Where branches meet, autograd adds gradients in place, unless somebody looks on, as here.
        in_place = func is torch.ops.aten.add.Tensor and torch._C._current_graph_task_id() >= 0
        if not in_place:
            self._alive.look(workspace_nbytes(func, args))


def _storage_of(tensor: Tensor) -> StorageWeakRef | None:
    # A weak reference keeps the address from being given to another storage, not the memory.
    if tensor.layout != torch.strided:
        return None
    return StorageWeakRef(tensor.untyped_storage())


def _all_alias(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> bool:
    storages = {_storage_of(tensor) for tensor in inputs} - {None}
    return bool(outputs) and all(_storage_of(tensor) in storages for tensor in outputs)
