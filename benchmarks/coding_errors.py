"""Compute mean errors of values that were encoded and decoded."""

from dataclasses import dataclass, field

from torch import Tensor

_WAYS = ("absolute", "squared", "relative")


@dataclass
class Errors:
    """Sums of coding errors over the values so far."""

    count: int = 0
    count_nonzero: int = 0
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_WAYS, 0.0))

    def add(self, values: Tensor, coded: Tensor) -> None:
        """Add the errors of the decoded values `coded` against the original `values`."""
        errors, sizes = (coded.double() - values).abs(), values.abs().double()
        nonzero = sizes > 0
        self.count += len(values)
        self.count_nonzero += int(nonzero.sum())
        self.sums["absolute"] += float(errors.sum())
        self.sums["squared"] += float(errors.square().sum())
        self.sums["relative"] += float((errors[nonzero] / sizes[nonzero]).sum())

    def means(self) -> dict[str, float]:
        """Return the mean errors; relative errors are averaged over nonzero values."""
        counts = {"relative": self.count_nonzero}
        return {way: total / counts.get(way, self.count) for way, total in self.sums.items()}
