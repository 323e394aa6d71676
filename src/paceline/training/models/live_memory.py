"""Count the memory of a traced step: live storages, workspaces, tensors kept for backward."""

import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef

from paceline.training.models.flops import stored_nbytes

_Slice = tuple[StorageWeakRef, int, tuple[int, ...]]

_BLOCK = 16  # oneDNN pads the number of channels to a multiple of 16
_FEW_CHANNELS = 4  # oneDNN does not reorder (pad) inputs with fewer channels than this
# Operations that copy their gradient input if it is not contiguous.
_GATHERING = (
    *(torch.ops.aten.avg_pool2d_backward, torch.ops.aten.max_pool2d_with_indices_backward),
    torch.ops.aten.convolution_backward,
)
_LSTM_KERNELS = (torch.ops.aten.mkldnn_rnn_layer, torch.ops.aten.mkldnn_rnn_layer_backward)


class LiveMemory:
    """Counts the live bytes of the storages that a trace creates, and their peak."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.peak_nbytes = 0
        # Keep the weak references: only a reference that still exists can call `_gone`.
        self._alive: dict[weakref.ref[torch.UntypedStorage], int] = {}

    def made(self, tensors: Sequence[Tensor], inputs: Sequence[Tensor] = ()) -> None:
        """Count the storages of an operation's results, except the storages of its inputs."""
        strided = [tensor for tensor in inputs if tensor.layout == torch.strided]
        before = {tensor.untyped_storage()._cdata for tensor in strided}
        for tensor in tensors:
            if tensor.layout != torch.strided:
                continue
            storage = tensor.untyped_storage()
            reference = weakref.ref(storage, self._gone)
            if storage._cdata not in before and reference not in self._alive:
                self._alive[reference] = storage.nbytes()
                self.nbytes += storage.nbytes()

    def update_peak(self, workspace_nbytes: int = 0) -> None:
        """Raise the peak if the live bytes plus an operation's workspace exceed it."""
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes + workspace_nbytes)

    def lap(self) -> int:
        """Return the peak in bytes since the previous call of `lap`, and reset the peak."""
        self.update_peak()
        peak, self.peak_nbytes = self.peak_nbytes, self.nbytes
        return peak

    def _gone(self, reference: "weakref.ref[torch.UntypedStorage]") -> None:
        self.nbytes -= self._alive.pop(reference, 0)


def workspace_nbytes(func: OpOverload, args: Sequence[Any]) -> int:
    """Return the bytes of temporary memory that an operation uses internally."""
    if func.overloadpacket in _LSTM_KERNELS:  # memory for the gates of all time steps
        inputs, _, of_states = args[:3]
        return int(inputs[..., 0].nbytes * of_states.shape[0])
    if func.overloadpacket not in _GATHERING:
        return 0
    gradient = args[0]
    gathered = 0 if gradient.is_contiguous() else gradient.nbytes
    if func.overloadpacket is not torch.ops.aten.convolution_backward:
        return int(gathered)
    inputs, needs_gradient = args[1], args[10][0]
    of_inputs = 2 * _blocked_nbytes(inputs) if needs_gradient else 0
    return int(gathered + max(of_inputs, _blocked_nbytes(inputs) + _blocked_nbytes(gradient)))


def _blocked_nbytes(tensor: Tensor) -> int:
    channels = tensor.shape[1]
    if channels < _FEW_CHANNELS:
        return 0
    return int(tensor.nbytes // channels * -(-channels // _BLOCK) * _BLOCK)


class SegmentActivations:
    """Records which tensors each segment of the forward pass makes, and which are read later.

    A segment is the part of the forward pass that belongs to one layer. A tensor counts once, for
    the last segment that changed it. Set `in_backward` before the backward pass: from then on, the
    storages that are read count as kept for the backward pass.
    """

    def __init__(self) -> None:
        self.segment = 0
        self.in_backward = False
        self._maker: dict[StorageWeakRef, int] = {}
        self._read: dict[int, dict[_Slice, tuple[int, int]]] = defaultdict(dict)
        self._kept: dict[int, dict[StorageWeakRef, int]] = defaultdict(dict)

    def read(self, tensors: Sequence[Tensor], outside: bool = False) -> None:
        """Record that the current segment or, if `outside`, the model's caller reads tensors."""
        for tensor in tensors:
            storage = storage_of(tensor)
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
        """Record that the current forward segment made tensors; does nothing in backward."""
        for tensor in () if self.in_backward else tensors:
            storage = storage_of(tensor)
            if storage is not None:
                self._maker[storage] = self.segment

    def nbytes(self, segment: int) -> int:
        """Return the bytes made by `segment` and read by later segments or the model's caller.

        Parts of one storage may overlap; together, they count as at most the storage's size.
        """
        sizes: dict[StorageWeakRef, int] = defaultdict(int)
        for (storage, _, _), (nbytes, limit) in self._read[segment].items():
            sizes[storage] = min(limit, sizes[storage] + nbytes)
        return sum(sizes.values())

    def kept_nbytes(self, segment: int) -> int:
        """Return the bytes made by `segment` and read by the backward pass."""
        return sum(self._kept[segment].values())


def storage_of(tensor: Tensor) -> StorageWeakRef | None:
    """Return the identity of a tensor's storage; None if the tensor is not strided."""
    # A weak reference lets the storage's data be freed, but keeps its address from being reused.
    if tensor.layout != torch.strided:
        return None
    return StorageWeakRef(tensor.untyped_storage())
