"""A network by name for data of a shape of their own."""

from math import prod

from torch import nn

from paceline.models.factory import find

ANY_WIDTH = "mlp"


def fitting(name: str, sample_shape: tuple[int, ...]) -> str:
    """Return the name of a network for samples of this shape.

    "mlp" without widths gets as many inputs as a sample has values; others are what they are.
    """
    if name != ANY_WIDTH:
        return name
    layers = [one for one in find(name).build(None).modules() if isinstance(one, nn.Linear)]
    widths = [prod(sample_shape), *(layer.out_features for layer in layers)]
    return "-".join([ANY_WIDTH, *map(str, widths)])
