"""Table 2 of Dettmers 2016: mean errors of the four types on four distributions, 25 M values each.

As there, dynamic8 and linear8 are scaled by the largest magnitude of all values, mantissa8 and
static8 by a fixed offset. `published.py` says what the printed figures seem to be instead.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import bnb
import published
import torch
from published import EXACT, EXAMPLES, PUBLISHED, TABLE_2, Distribution
from torch import Tensor

from paceline.codecs.blockwise import EightBit
from paceline.codecs.quantization import TABLES
from paceline.native import decode_into, encode_into

_COUNT, _QUICK_COUNT, _PIECE = 25_000_000, 500_000, 500_000
_SCALED = ("dynamic8", "linear8")
_NEAREST, _PUBLISHED, _BITSANDBYTES = "nearest", "published", "bitsandbytes"
_NUM_CODES = 256

Coding = Callable[[Tensor], Tensor]


@dataclass
class _Errors:
    """Sums over the values so far."""

    count: int = 0
    count_nonzero: int = 0
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_WAYS, 0.0))

    def add(self, values: Tensor, coded: Tensor) -> None:
        errors, sizes = (coded.double() - values).abs(), values.abs().double()
        nonzero = sizes > 0
        self.count += len(values)
        self.count_nonzero += int(nonzero.sum())
        self.sums["absolute"] += float(errors.sum())
        self.sums["squared"] += float(errors.square().sum())
        self.sums["relative"] += float((errors[nonzero] / sizes[nonzero]).sum())

    def means(self) -> dict[str, float]:
        counts = {"relative": self.count_nonzero}
        return {way: total / counts.get(way, self.count) for way, total in self.sums.items()}


_WAYS = ("absolute", "squared", "relative")


def measure(quick: bool) -> dict[str, Any]:
    """Return all errors, and what explains the printed ones."""
    count = _QUICK_COUNT if quick else _COUNT
    return {
        "count": count,
        "distributions": {name: _errors(one, count) for name, one in TABLE_2.items()},
        "examples": [_example(*example) for example in EXAMPLES],
        "least_absolute": _least_absolute(count),
        "unreachable": _unreachable(),
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


def _pieces(distribution: Distribution, count: int) -> Iterator[Tensor]:
    return (distribution.piece(number, _PIECE) for number in range(count // _PIECE))


def _codings(largest: float, offset: float) -> Mapping[tuple[str, str], Coding]:
    """Return what values become: by our codec, by the published search, and by bitsandbytes."""
    codings: dict[tuple[str, str], Coding] = {}
    for name in TABLES:
        scale = largest if name in _SCALED else offset
        codings[name, _NEAREST] = partial(_by_codec, EightBit(name, offset=scale))
        codings[name, _PUBLISHED] = partial(_by_search, published.codebook(name), scale)
    if bnb.functional():
        codings["dynamic8", _BITSANDBYTES] = partial(_by_bitsandbytes, largest)
    return codings


def _by_codec(codec: EightBit, values: Tensor) -> Tensor:
    return codec.decode(codec.encode(values))


def _by_search(book: Any, scale: float, values: Tensor) -> Tensor:
    codes, coded = torch.empty(len(values), dtype=torch.uint8), torch.empty_like(values)
    scales, threads = torch.tensor([scale]), torch.get_num_threads()
    encode_into(codes, scales, values, len(values), book, False, threads)
    decode_into(coded, codes, scales, len(values), book, False, threads)
    return coded


def _by_bitsandbytes(largest: float, values: Tensor) -> Tensor:
    # It scales a block by its largest value: one block, which has that of all values.
    block = torch.cat([values, torch.tensor([largest])])
    functional = bnb.functional()
    codes, state = functional.quantize_blockwise(block, blocksize=len(block))
    coded: Tensor = functional.dequantize_blockwise(codes, state)[:-1]
    return coded


def _example(value: float, num_bits: int, power: int, printed: float) -> dict[str, float]:
    return {
        "value": value,
        "printed": printed,
        "halves": published.nearest_leaf(value, num_bits, power, EXACT),
        "published": published.nearest_leaf(value, num_bits, power, PUBLISHED),
    }


def _least_absolute(count: int) -> dict[str, float]:
    """Return the least mean absolute error that 256 magnitudes can have on U(0,1).

    It is that of equal intervals, each coded as its middle: a quarter of their width.
    """
    errors = _Errors()
    for piece in _pieces(TABLE_2["U(0,1)"], count):
        errors.add(piece, ((piece * _NUM_CODES).floor() + 0.5) / _NUM_CODES)
    return {"closed_form": 1 / (4 * _NUM_CODES), "measured": errors.means()["absolute"]}


def _unreachable() -> dict[str, list[float]] | None:
    """Return bitsandbytes' codes that no value gets: not its own, and not one beside it."""
    functional = bnb.functional()
    if not functional:
        return None
    meanings = functional.create_dynamic_map()
    infinity = torch.tensor(torch.inf)
    tried = [
        meanings,
        torch.nextafter(meanings, infinity),
        torch.nextafter(meanings, -infinity),
        (meanings[1:] + meanings[:-1]) / 2,
        torch.linspace(-1, 1, 4_000_001),
    ]
    values = torch.cat(tried).clamp(-1, 1)
    codes, _ = functional.quantize_blockwise(values, blocksize=len(values))
    reached = torch.zeros(_NUM_CODES, dtype=torch.bool)
    reached[codes.long()] = True
    missing = (~reached).nonzero().flatten().tolist()
    zero, state = functional.quantize_blockwise(torch.tensor([1.0, 0.0]))
    return {
        "codes": missing,
        "meanings": meanings[missing].tolist(),
        "zero_becomes": functional.dequantize_blockwise(zero, state)[1:].tolist(),
    }
