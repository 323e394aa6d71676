"""Networks, the search for a network by name, and their description as workloads."""

from paceline.models.describe import describe
from paceline.models.factory import find, names
from paceline.models.layers import layers_of

__all__ = ["describe", "find", "layers_of", "names"]
