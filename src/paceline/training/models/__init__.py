"""Networks, models by name, and their description as workloads."""

from paceline.training.models.describe import describe
from paceline.training.models.factory import find, names
from paceline.training.models.layers import layers_of

__all__ = ["describe", "find", "layers_of", "names"]
