"""Load data sets by name, and draw each worker's batches."""

from importlib import import_module
from typing import TYPE_CHECKING

from paceline.training.data.sampler import BalancedSampler, ShardedBatches

if TYPE_CHECKING:
    from paceline.training.data.dataset import Collate, Dataset, loader
    from paceline.training.data.spec import load
else:

    def __getattr__(name: str) -> object:
        # Import these names on first use, because their modules need torch; the samplers do not.
        if name in ("Collate", "Dataset", "load", "loader"):
            module = "spec" if name == "load" else "dataset"
            return getattr(import_module(f"paceline.training.data.{module}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["BalancedSampler", "Collate", "Dataset", "ShardedBatches", "load", "loader"]
