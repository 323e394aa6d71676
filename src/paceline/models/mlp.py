"""Fully-connected networks: with rectifiers, and those of Ma, Rusu et al. 2020 with sigmoids."""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from paceline.core.errors import InvalidInput
from paceline.models.initialize import centred_normal_, he_normal_


class MLP(nn.Module):
    """A chain of fully-connected layers with rectifiers between them.

    `widths` are the units of every layer from the input to the output, as in 54-512-512-2. The
    input is (N, ...) with `widths[0]` values per sample, the scores are (N, `widths[-1]`).
    Raises InvalidInput unless there are at least two widths, all of them positive.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.check(widths)
        layers: list[nn.Module] = [nn.Flatten()]
        for inputs, outputs in pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.ReLU(inplace=True)]
        self.layers = nn.Sequential(*layers[:-1])
        he_normal_(self)

    @staticmethod
    def check(widths: Sequence[int]) -> None:
        """Raise InvalidInput unless `widths` are at least two positive numbers."""
        if len(widths) < 2 or min(widths) < 1:
            shown = "-".join(map(str, widths))
            raise InvalidInput(f"an MLP needs at least two widths, all positive, not {shown!r}")

    def forward(self, samples: Tensor) -> Tensor:
        """Scores (N, `widths[-1]`) of `samples` (N, ...)."""
        scores: Tensor = self.layers(samples)
        return scores


class SigmoidMLP(nn.Module):
    """A chain of fully-connected layers without biases, with sigmoids between them.

    The networks of Ma, Rusu et al. 2020, section VII-A: the softmax behind the last layer belongs
    to the loss. `widths`, input and scores are as in `MLP`, and so is the error.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        MLP.check(widths)
        layers: list[nn.Module] = [nn.Flatten()]
        for inputs, outputs in pairwise(widths):
            layers += [nn.Linear(inputs, outputs, bias=False), nn.Sigmoid()]
        self.layers = nn.Sequential(*layers[:-1])
        centred_normal_(self)

    def forward(self, samples: Tensor) -> Tensor:
        """Scores (N, `widths[-1]`) of `samples` (N, ...)."""
        scores: Tensor = self.layers(samples)
        return scores
