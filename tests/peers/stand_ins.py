"""Classes that replace DistributedDataParallel: itself, or Paceline's with an exchange.

Each is a separate class of this module, because unpickling looks up a model's class by name.
"""

from typing import Any, ClassVar

from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline


class _OnCpu:
    """Drops the arguments for GPUs, which must be missing for modules on the CPU."""

    exchange: ClassVar[dict[str, str]] = {}

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("device_ids", None)
        kwargs.pop("output_device", None)
        super().__init__(module, *args, **kwargs, **self.exchange)


def _class(name: str, base: type[nn.Module], **exchange: str) -> type[nn.Module]:
    return type(name, (_OnCpu, base), {"exchange": exchange, "__module__": __name__})


Torch = _class("Torch", DistributedDataParallel)
Auto, AllReduce, Tree, Host = (
    _class(name, paceline.DataParallel, exchange=name.lower())
    for name in ("Auto", "AllReduce", "Tree", "Host")
)


STAND_INS: dict[str, type[nn.Module]] = {
    "ddp": Torch,
    "auto": Auto,
    "allreduce": AllReduce,
    "tree": Tree,
    "host": Host,
}
