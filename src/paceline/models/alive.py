"""What is alive at each moment of a traced step: tensors, and what operations take for a moment.

Of the latter only backward's is known, as oneDNN does it on a CPU: a convolution's tensors are put
into blocks of 16 channels, and its result comes back through one more copy; and gradients that lie
apart, as those of concatenated branches do, are brought together. cuDNN takes as it likes.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

_BLOCK = 16
_FEW_CHANNELS = 4  # up to which a convolution reads its input as it lies
_GATHERING = frozenset(
    {
        torch.ops.aten.avg_pool2d_backward,
        torch.ops.aten.convolution_backward,
        torch.ops.aten.max_pool2d_with_indices_backward,
    }
)


class Alive:
    """Counts the bytes of the storages that were made while tracing, and are still referred to.

    `nbytes` are those of now, `peak_nbytes` the most since the last call of `lap`.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self.peak_nbytes = 0
        # A weak reference says when the storage goes, and must itself be kept until then.
        self._alive: dict[weakref.ref[torch.UntypedStorage], int] = {}

    def made(self, tensors: Sequence[Tensor], inputs: Sequence[Tensor] = ()) -> None:
        """Count what an operation has returned, but for what its inputs lie in."""
        before = {tensor.untyped_storage()._cdata for tensor in inputs if _is_plain(tensor)}
        for tensor in filter(_is_plain, tensors):
            storage = tensor.untyped_storage()
            reference = weakref.ref(storage, self._gone)
            if storage._cdata not in before and reference not in self._alive:
                self._alive[reference] = storage.nbytes()
                self.nbytes += storage.nbytes()

    def look(self, workspace_nbytes: int = 0) -> None:
        """Compare what is alive, and what the operation took beside it, with the most so far."""
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes + workspace_nbytes)

    def lap(self) -> int:
        """Return the most since the last call, and begin anew."""
        self.look()
        peak, self.peak_nbytes = self.peak_nbytes, self.nbytes
        return peak

    def _gone(self, reference: "weakref.ref[torch.UntypedStorage]") -> None:
        self.nbytes -= self._alive.pop(reference, 0)


def workspace_nbytes(func: OpOverload, args: Sequence[Any]) -> int:
    """Return the bytes that an operation of backward takes and gives back before it is done."""
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


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided
