"""Import torch's tests of DistributedDataParallel so that they run on the CPU.

The installed module is imported with its skip decorators disabled, and its GPU devices replaced by
the CPU, in this process only. This includes tests that torch never runs.
"""

import functools
import os
import sys
import unittest
from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

MODULE = "torch.testing._internal.distributed.distributed_test"
NUM_RANKS = 2
# Functions of torch that tests call with `device=self.rank` or `device="cuda"`.
_FACTORIES = ("empty", "full", "ones", "rand", "randn", "tensor", "zeros")


def imported(stand_in: type[nn.Module]) -> ModuleType:
    """Return torch's test module, with `stand_in` for DistributedDataParallel."""
    os.environ |= {"BACKEND": "gloo", "WORLD_SIZE": str(NUM_RANKS)}
    _without_expecttest()
    suite = _imported()
    _move_to_cpu()
    suite.torch = _OnCpu(
        torch, {name: _without_device(getattr(torch, name)) for name in _FACTORIES}
    )
    suite.torch.cuda = _OnCpu(torch.cuda, _CUDA)
    suite.autocast = functools.partial(torch.amp.autocast, "cpu")
    suite.GradScaler = functools.partial(torch.amp.GradScaler, "cpu")
    suite.init_multigpu_helper = lambda world_size, _: {rank: [rank] for rank in range(world_size)}
    _shrink(suite.DistributedTest._DistTestBase.test_ddp_uneven_inputs)
    suite.HAS_TORCHVISION = False  # no large models, and the same ones on all machines
    suite.DistributedDataParallel = nn.parallel.DistributedDataParallel = stand_in
    return suite


def _without_expecttest() -> None:
    """Stub expecttest, which the tests of DDP import and do not use."""
    stub = ModuleType("expecttest")
    stub.TestCase, stub.ACCEPT = unittest.TestCase, False
    sys.modules["expecttest"] = stub


def _imported() -> ModuleType:
    """Import the tests with skip decorators disabled."""
    from torch.testing._internal import common_distributed

    def always(*_: object, **__: object) -> Callable[[Any], Any]:
        return lambda test: test

    with (
        mock.patch.object(common_distributed, "skip_if_no_gpu", lambda test: test),
        mock.patch.object(common_distributed, "skip_if_lt_x_gpu", always),
        mock.patch.object(unittest, "skipIf", always),
        mock.patch.object(unittest, "skip", always),
    ):
        __import__(MODULE)
    return sys.modules[MODULE]


class _OnCpu(ModuleType):
    """A module with some of its functions replaced by ones for the CPU."""

    def __init__(self, module: ModuleType, instead: dict[str, Any]) -> None:
        super().__init__(module.__name__)
        self.__dict__.update(instead)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


_CUDA: dict[str, Any] = {
    "current_device": torch.distributed.get_rank,
    "device_count": lambda: NUM_RANKS,
    "manual_seed": lambda _: None,
    "set_device": lambda _: None,
    "synchronize": lambda *_, **__: None,
}


def _shrink(test: Any) -> None:
    """Make the images of a test, which would take minutes on a CPU, smaller."""
    consts = tuple(20 if value == 1000 else value for value in test.__code__.co_consts)
    test.__code__ = test.__code__.replace(co_consts=consts)


def _is_gpu(device: object) -> bool:
    """Whether a device argument is a GPU: a number, "cuda", "cuda:0"."""
    number = isinstance(device, int) and not isinstance(device, bool)
    return number or (isinstance(device, str | torch.device) and str(device).startswith("cuda"))


def _without_device(made: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(made)
    def on_cpu(*args: Any, **kwargs: Any) -> Tensor:
        if _is_gpu(kwargs.get("device")):
            del kwargs["device"]
        return made(*args, **kwargs)

    return on_cpu


def _move_to_cpu() -> None:
    """Make `x.cuda()` and `x.to(rank)` of tensors and modules return x."""
    for kind in (Tensor, nn.Module):
        kind.cuda = lambda self, *_, **__: self
        kind.to = _to(kind.to)


def _to(moved: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(moved)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        kept = tuple(value for value in args if not _is_gpu(value))
        if not kept and not kwargs:
            return self
        return moved(self, *kept, **kwargs)

    return to
