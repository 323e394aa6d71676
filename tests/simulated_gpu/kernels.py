"""Count the kernels that CUDA would launch for an operation on simulated tensors.

An operation on lists of tensors, such as `torch._foreach_copy_`, uses one kernel for many tensors
if all tensors of a list have the same dtype, and corresponding tensors have equal strides.
Otherwise torch launches a kernel per tensor.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

_MOST_TENSORS = {1: 110, 2: 64}  # per launch, by the number of lists


def num_kernels(func: Any, args: Sequence[Any]) -> int:
    """Return the number of kernels of an operation: 1, except for operations on lists."""
    if not func._schema.name.startswith("aten::_foreach_"):
        return 1
    lists = [one for one in args if isinstance(one, list | tuple)]
    if not lists or len(lists) > 2 or not all(map(_have_one_type, lists)):
        return max([1, *map(len, lists)])
    if any(_strides(pair[0]) != _strides(pair[-1]) for pair in zip(*lists, strict=True)):
        return len(lists[0])
    return -(-len(lists[0]) // _MOST_TENSORS[len(lists)])


def _have_one_type(tensors: Sequence[Tensor]) -> bool:
    return len({one.dtype for one in tensors}) == 1


def _strides(tensor: Tensor) -> list[int]:
    """Return the strides of dimensions larger than 1; other strides have no effect."""
    both = zip(tensor.size(), tensor.stride(), strict=True)
    return [stride for size, stride in both if size != 1]
