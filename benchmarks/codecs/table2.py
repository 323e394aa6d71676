"""Reproduce Table 2 of Dettmers 2016: mean errors of four types on four distributions.

Each distribution has 25 M values. As in the paper, dynamic8 and linear8 are scaled by the largest
magnitude of all values, mantissa8 and static8 by a fixed offset.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from figures import table
from paceline.codecs.blockwise import EightBit
from paceline.codecs.quantization import TABLES

_COUNT, _QUICK_COUNT, _PIECE = 25_000_000, 500_000, 500_000
_SCALED = ("dynamic8", "linear8")
_NEAREST, _BITSANDBYTES = "nearest", "bitsandbytes"

Coding = Callable[[Tensor], Tensor]


class Distribution(NamedTuple):
    """A row of the table: N(0, deviation^2), or U(0,1) if `deviation` is None.

    `printed`: the paper's mean "absolute" error and mean relative error in percent, by type.
    """

    seed: int  # of the first piece
    deviation: float | None
    offset: float  # fixed scale of mantissa8 and static8
    printed: dict[str, tuple[float, float]]

    def piece(self, number: int, count: int) -> Tensor:
        """Draw `count` float32 values: piece `number` of the sample's at most 1000 pieces."""
        generator = torch.Generator().manual_seed(self.seed + number)
        if self.deviation is None:
            return torch.rand(count, generator=generator)
        return self.deviation * torch.randn(count, generator=generator)


_TYPES = ("dynamic8", "linear8", "mantissa8", "static8")  # in the order of the table


def _printed(*errors: tuple[float, float]) -> dict[str, tuple[float, float]]:
    return dict(zip(_TYPES, errors, strict=True))


TABLE_2 = {
    "U(0,1)": Distribution(
        seed=0,
        deviation=None,
        offset=10,
        printed=_printed((0.00004, 1.39), (0.0024, 2.16), (0.0017, 7.22), (0.0007, 4.82)),
    ),
    "N(0,1)": Distribution(
        seed=1000,
        deviation=1,
        offset=10,
        printed=_printed((0.0005, 2.46), (0.0004, 6.47), (0.0104, 6.89), (0.0093, 6.3)),
    ),
    "N(0,10^2)": Distribution(
        seed=2000,
        deviation=10,
        offset=100,
        printed=_printed((0.049, 2.49), (0.041, 6.44), (1.066, 7.19), (0.926, 6.28)),
    ),
    "N(0,0.2^2)": Distribution(
        seed=3000,
        deviation=0.2,
        offset=10,
        printed=_printed((0.000018, 2.45), (0.000015, 6.15), (0.00055, 8.26), (0.00022, 6.58)),
    ),
}


def measure(quick: bool) -> dict[str, Any]:
    """Return the measured errors and the printed ones."""
    count = _QUICK_COUNT if quick else _COUNT
    return {
        "count": count,
        "distributions": {name: _errors(one, count) for name, one in TABLE_2.items()},
    }


def _errors(distribution: Distribution, count: int) -> dict[str, Any]:
    """Return the mean errors of each coding on one distribution."""
    scale = max(float(piece.abs().max()) for piece in _pieces(distribution, count))
    codings = _codings(scale, distribution.offset)
    errors = {key: _Errors() for key in codings}
    for piece in _pieces(distribution, count):
        for key, coding in codings.items():
            errors[key].add(piece, coding(piece))
    types = {
        name: {way: errors[name, way].means() for kind, way in codings if kind == name}
        for name in TABLES
    }
    for name, (absolute, percent) in distribution.printed.items():
        types[name]["printed"] = {"absolute": absolute, "relative": percent / 100}
    return {"largest": scale, "types": types}


class _Errors:
    """Sums of coding errors over the values so far."""

    def __init__(self) -> None:
        self._count = self._count_nonzero = 0
        self._sums: dict[str, float] = defaultdict(float)

    def add(self, values: Tensor, coded: Tensor) -> None:
        """Add the errors of the decoded values `coded` against the original `values`."""
        errors, sizes = (coded.double() - values).abs(), values.abs().double()
        nonzero = sizes > 0
        self._count += len(values)
        self._count_nonzero += int(nonzero.sum())
        self._sums["absolute"] += float(errors.sum())
        self._sums["squared"] += float(errors.square().sum())
        self._sums["relative"] += float((errors[nonzero] / sizes[nonzero]).sum())

    def means(self) -> dict[str, float]:
        """Return the mean errors; relative errors are averaged over nonzero values."""
        counts = {"relative": self._count_nonzero}
        return {way: total / counts.get(way, self._count) for way, total in self._sums.items()}


def _pieces(distribution: Distribution, count: int) -> Iterator[Tensor]:
    return (distribution.piece(number, _PIECE) for number in range(count // _PIECE))


def _codings(largest: float, offset: float) -> Mapping[tuple[str, str], Coding]:
    """Return functions that encode and decode values, by type and implementation."""
    codings: dict[tuple[str, str], Coding] = {}
    for name in TABLES:
        scale = largest if name in _SCALED else offset
        codings[name, _NEAREST] = partial(_by_codec, EightBit(name, offset=scale))
    if find_spec(_BITSANDBYTES):
        codings["dynamic8", _BITSANDBYTES] = partial(_by_bitsandbytes, largest)
    return codings


def _by_codec(codec: EightBit, values: Tensor) -> Tensor:
    return codec.decode(codec.encode(values))


def _by_bitsandbytes(largest: float, values: Tensor) -> Tensor:
    # It scales a block by its largest value: append the largest of all values to a single block.
    block = torch.cat([values, torch.tensor([largest])])
    functional = import_module("bitsandbytes.functional")
    codes, state = functional.quantize_blockwise(block, blocksize=len(block))
    coded: Tensor = functional.dequantize_blockwise(codes, state)[:-1]
    return coded


def text(figures: dict[str, Any]) -> str:
    """Return the table."""
    head = ("values", "type", "printed, %", "ours, %", "by printed", "bitsandbytes, %")
    columns = (*head, "printed as absolute", "ours, absolute", "ours, squared")
    lines = [
        (
            distribution,
            name,
            f"{100 * ways['printed']['relative']:.2f}",
            f"{100 * ways['nearest']['relative']:.2f}",
            f"{ways['nearest']['relative'] / ways['printed']['relative']:.2f}",
            f"{100 * ways['bitsandbytes']['relative']:.2f}" if "bitsandbytes" in ways else "",
            f"{ways['printed']['absolute']:g}",
            f"{ways['nearest']['absolute']:.2g}",
            f"{ways['nearest']['squared']:.2g}",
        )
        for distribution, found in figures["distributions"].items()
        for name, ways in found["types"].items()
    ]
    return table(f"Mean relative and absolute errors, {figures['count']:,} values", columns, lines)
