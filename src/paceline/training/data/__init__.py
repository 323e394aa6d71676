"""Load data sets by name, and draw each worker's batches."""

from paceline.training.data.dataset import Collate, Dataset, loader
from paceline.training.data.sampler import BalancedSampler, ShardedBatches
from paceline.training.data.spec import load

__all__ = ["BalancedSampler", "Collate", "Dataset", "ShardedBatches", "load", "loader"]
