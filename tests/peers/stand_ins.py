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
