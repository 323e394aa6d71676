"""Define a two-layer LSTM with 256 units per layer, for sequences of 64 features."""

from torch import Tensor, nn


class Lstm(nn.Module):
    """Classifies a sequence into ten classes by the last output."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(64, 256, num_layers=2, batch_first=True)
        self.head = nn.Linear(256, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the scores of the classes."""
        scores: Tensor = self.head(self.layers(inputs)[0][:, -1])
        return scores
