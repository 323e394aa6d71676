"""Memory that CUDA did not allocate, pinned so that a GPU copies it by itself."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def pin(memory: Tensor) -> Callable[[], None]:
    """Pin the memory of a tensor of bytes, and return what undoes it."""
    runtime = torch.cuda.cudart()
    _check(runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0), "cudaHostRegister")

    def unpin() -> None:
        _check(runtime.cudaHostUnregister(memory.data_ptr()), "cudaHostUnregister")

    return unpin


def _check(status: Any, call: str) -> None:
    if int(status) != 0:
        raise RuntimeError(f"{call} failed with CUDA error {int(status)}")
