"""What is put in the place of DistributedDataParallel: itself, or Paceline's with an exchange.

Each has a class of its own: where a model was pickled, its class is looked up by name.
"""

from typing import Any, ClassVar

from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline


class _OnCpu:
    """Leaves out the GPUs that tests name: with modules on the CPU there must be none."""

    exchange: ClassVar[dict[str, str]] = {}

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("device_ids", None)
        kwargs.pop("output_device", None)
        super().__init__(module, *args, **kwargs, **self.exchange)


class Torch(_OnCpu, DistributedDataParallel):
    pass


class Auto(_OnCpu, paceline.DataParallel):
    exchange: ClassVar = {"exchange": "auto"}


class AllReduce(_OnCpu, paceline.DataParallel):
    exchange: ClassVar = {"exchange": "allreduce"}


class Tree(_OnCpu, paceline.DataParallel):
    exchange: ClassVar = {"exchange": "tree"}


class Host(_OnCpu, paceline.DataParallel):
    exchange: ClassVar = {"exchange": "host"}


STAND_INS: dict[str, type[nn.Module]] = {
    "ddp": Torch,
    "auto": Auto,
    "allreduce": AllReduce,
    "tree": Tree,
    "host": Host,
}
