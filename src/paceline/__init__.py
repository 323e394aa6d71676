"""Paceline: parallel training of PyTorch models on uneven hardware, predicted beforehand.

Importing it touches no device, starts no thread, and does not import torch.
"""

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.api import Rehearsal, Run, plan, rehearse, train
    from paceline.data_parallel import DataParallel
    from paceline.exchange.hook import ddp_hook

__version__ = version("paceline")
__all__ = [
    "DataParallel",
    "Rehearsal",
    "Run",
    "__version__",
    "ddp_hook",
    "plan",
    "rehearse",
    "train",
]


def __getattr__(name: str) -> Any:
    if name == "DataParallel":
        from paceline.data_parallel import DataParallel

        return DataParallel
    if name == "ddp_hook":
        from paceline.exchange.hook import ddp_hook

        return ddp_hook
    if name in __all__:
        from paceline import api

        return getattr(api, name)
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")
