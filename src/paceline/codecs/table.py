"""The four 8-bit types of Dettmers 2016, section 3.1: tables of what seven bits of magnitude mean.

The eighth bit is the sign. All four hold zero: where a tree has 128 leaves, it takes the place of
the smallest one.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from paceline.core.errors import InvalidInput

_NUM_MAGNITUDES = 128


@dataclass(frozen=True, eq=False)
class Table:
    """Magnitudes in ascending order, from 0 to at most 1: float32, at most 128 of them.

    Code i means magnitudes[i], and code 128 + i the negative of it.
    """

    name: str
    magnitudes: Tensor

    @cached_property
    def thresholds(self) -> Tensor:
        """float32 [len(magnitudes) - 1]: what is greater than number i is nearer to i + 1.

        Each is the largest float32 that is not above the midpoint of two magnitudes, so that no
        float32 is on the wrong side of it; a value in the very middle goes to the smaller one.
        """
        exact = self.magnitudes.double()
        middles = (exact[:-1] + exact[1:]) / 2
        rounded = middles.float()
        too_large = rounded.double() > middles
        return torch.where(too_large, torch.nextafter(rounded, torch.tensor(0.0)), rounded)

    @cached_property
    def values(self) -> Tensor:
        """float32 [256]: what each code means. Codes that are never written mean zero."""
        half = torch.zeros(_NUM_MAGNITUDES)
        half[: len(self.magnitudes)] = self.magnitudes
        return torch.cat([half, -half])


def table(name: str) -> Table:
    """Return one of `TABLES`. InvalidInput if there is none of that name."""
    if name not in TABLES:
        raise InvalidInput(f"table: {name!r} is not known; choose one of {', '.join(TABLES)}")
    return Table(name, _ascending(TABLES[name]()))


def dynamic8() -> Iterable[float]:
    """Return the dynamic tree's: n zeros for 10^-n, a one, and 6 - n bits that bisect (0.1, 1)."""
    return (leaf / 10**n for n in range(7) for leaf in _leaves(6 - n))


def static8() -> Iterable[float]:
    """Return the static tree's: three bits of exponent, and four that bisect (0.1, 1)."""
    return (leaf / 10**n for n in range(8) for leaf in _leaves(4))


def mantissa8() -> Iterable[float]:
    """Return those of a decimal mantissa from 0 to 15, and of three bits of exponent."""
    return (
        digit / 10 ** (n + 1) for n in range(8) for digit in range(16) if digit <= 10 ** (n + 1)
    )


def linear8() -> Iterable[float]:
    """Return those of linear quantisation: a tree over (0, 1) without an exponent."""
    return (i / (_NUM_MAGNITUDES - 1) for i in range(_NUM_MAGNITUDES))


def _leaves(num_bits: int) -> list[float]:
    """Return the middles of the intervals that bits bisect (0.1, 1) into."""
    width = 0.9 / 2**num_bits
    return [0.1 + width * (i + 0.5) for i in range(2**num_bits)]


def _ascending(magnitudes: Iterable[float]) -> Tensor:
    """Return them in order, each once, and zero: in the place of the smallest if need be."""
    rounded = torch.tensor(list(magnitudes), dtype=torch.float64).float().tolist()
    nonzero = sorted({value for value in rounded if value > 0})
    return torch.tensor([0.0, *nonzero[-(_NUM_MAGNITUDES - 1) :]])


TABLES: dict[str, Callable[[], Iterable[float]]] = {
    one.__name__: one for one in (dynamic8, static8, mantissa8, linear8)
}
