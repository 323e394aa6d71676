"""Data sets by name, and the batches that every worker takes from them.

The names that need torch are imported on first use, so that the sampler is usable without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from paceline.data.balanced import BalancedSampler
from paceline.data.sampler import ShardedBatches

if TYPE_CHECKING:
    from paceline.data.collate import Collate
    from paceline.data.dataset import Dataset, loader
    from paceline.data.spec import load
else:
    _MODULE_OF = {
        "Collate": "paceline.data.collate",
        "Dataset": "paceline.data.dataset",
        "loader": "paceline.data.dataset",
        "load": "paceline.data.spec",
    }

    def __getattr__(name: str) -> object:
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_MODULE_OF[name]), name)


__all__ = ["BalancedSampler", "Collate", "Dataset", "ShardedBatches", "load", "loader"]
