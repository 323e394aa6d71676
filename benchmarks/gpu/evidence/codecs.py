"""Measure 8-bit codecs on a GPU against `copy_` and, if installed, bitsandbytes.

In each round, each variant runs once on the same 64 M values, in random order. GPU events time
kernels; a matrix product keeps the GPU busy until the host has queued them. The host's clock times
a "whole call" of the public function; ours also waits for the number of non-finite values. Bytes
are the minimum read and written per value: 5 to encode or decode (float32 and code), 9 to decode
and add, 8 for `copy_`; codecs add 4 per block for its scale.
"""

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from part import Part, PartFailedError
from torch import Tensor

from figures import shown, spread
from paceline.codecs.blockwise import EightBit
from paceline.codecs.kernels import has_triton
from paceline.codecs.quantization import TABLES, table
from paceline.links.devices import Device
from ranks import in_turns

sys.path.append(str(Path(__file__).parents[2] / "codecs"))

import bnb

_COUNT, _SMOKE_COUNT = 64_000_000, 4_000
_BLOCK_SIZES = (1024, 4096)  # our default, and bitsandbytes'
_WARM_UP, _ROUNDS, _SMOKE_ROUNDS = 5, 50, 2
_BUSY_SIDE = 4096  # of matrices whose product lasts a few milliseconds on a GPU
_COPY = "copy_"


@dataclass(frozen=True)
class Variant:
    """A function to time, and the bytes that it reads and writes."""

    run: Callable[[], object]
    nbytes: int
    is_whole_call: bool = False


class Stopwatch:
    """Times variants on a device."""

    def __init__(self, device: Device, busy_side: int) -> None:
        self._device = device
        self._busy = torch.zeros(busy_side, busy_side, device=device.torch_device)
        self._product = torch.empty_like(self._busy)

    def seconds(self, variant: Variant) -> float:
        """Run a variant once and return its seconds."""
        self._device.synchronize()
        if variant.is_whole_call:
            begun = time.perf_counter()
            variant.run()
            self._device.synchronize()
            return time.perf_counter() - begun
        torch.mm(self._busy, self._busy, out=self._product)  # while the host queues the rest
        begin = self._device.record(timed=True)
        variant.run()
        end = self._device.record(timed=True)
        end.synchronize()
        elapsed_ms: float = begin.elapsed_time(end)
        return elapsed_ms * 1e-3


def run(part: Part) -> None:
    """Measure all variants."""
    count, rounds = (_SMOKE_COUNT, _SMOKE_ROUNDS) if part.smoke else (_COUNT, _ROUNDS)
    values = torch.randn(count, generator=torch.Generator().manual_seed(0))
    values = values.to(part.device.torch_device)
    found = whole_calls(values) | bitsandbytes(values)
    found |= kernels(values) if has_triton(values) else {}
    stopwatch = Stopwatch(part.device, 8 if part.smoke else _BUSY_SIDE)
    figures = _compared(_copy(values) | found, stopwatch, rounds)
    part.keep(f"{count:,} values", figures, _line(figures))
    if part.device.has_triton and not has_triton(values):
        raise PartFailedError("Triton, or the C compiler that it needs, is not installed here")


def _line(figures: Mapping[str, Any]) -> str:
    copied = f"copy_ {figures[_COPY]['bytes_per_s']['median'] / 1e9:.0f} GB/s"
    ways = (
        f"{name} {shown(row['of_copy'], 1, 2)} of it"
        for name, row in figures.items()
        if name.startswith(("dynamic8", "bitsandbytes"))
    )
    return "; ".join([copied, *ways])


def _copy(values: Tensor) -> dict[str, Variant]:
    target = torch.empty_like(values)
    return {_COPY: Variant(lambda: target.copy_(values), 8 * len(values))}


def kernels(values: Tensor) -> dict[str, Variant]:
    """Return the Triton kernels of each type; decoding writes to existing tensors."""
    target, total = torch.empty_like(values), torch.zeros_like(values)
    found = {}
    for name in TABLES:
        for way, variant in _of_type(name, values, target, total).items():
            found[f"{name}, {way}"] = variant
    return found


def _of_type(name: str, values: Tensor, target: Tensor, total: Tensor) -> dict[str, Variant]:
    from paceline.codecs import triton_kernels

    one, block_size = table(name), _BLOCK_SIZES[0]
    codes, scales, _ = triton_kernels.encode(values, None, block_size, one)
    nbytes = _nbytes(values, block_size)

    def decode(into: Tensor, adds: bool) -> Callable[[], object]:
        return lambda: triton_kernels.decode(into, codes, scales, block_size, one, adds)

    return {
        "encode": Variant(lambda: triton_kernels.encode(values, None, block_size, one), nbytes),
        "decode": Variant(decode(target, False), nbytes),
        "decode and add": Variant(decode(total, True), nbytes + 4 * len(values)),
    }


def whole_calls(values: Tensor) -> dict[str, Variant]:
    """Return the public encode and decode functions, which allocate their results."""
    found = {}
    for block_size in _BLOCK_SIZES:
        codec = EightBit("dynamic8", block_size)
        found |= _calls(
            f"dynamic8, blocks of {block_size}",
            _nbytes(values, block_size),
            lambda codec=codec: codec.encode(values),
            codec.decode,
        )
    return found


def bitsandbytes(values: Tensor) -> dict[str, Variant]:
    """Return bitsandbytes' encode and decode functions; empty if it is not installed."""
    functional = bnb.functional()
    found: dict[str, Variant] = {}
    for block_size in _BLOCK_SIZES if functional else ():
        found |= _calls(
            f"bitsandbytes, blocks of {block_size}",
            _nbytes(values, block_size),
            lambda size=block_size: functional.quantize_blockwise(values, blocksize=size),
            lambda encoded: functional.dequantize_blockwise(*encoded),
        )
    return found


def _calls(
    name: str, nbytes: int, encode: Callable[[], Any], decode: Callable[[Any], object]
) -> dict[str, Variant]:
    encoded = encode()
    return {
        f"{name}, encode": Variant(encode, nbytes, is_whole_call=True),
        f"{name}, decode": Variant(lambda: decode(encoded), nbytes, is_whole_call=True),
    }


def _nbytes(values: Tensor, block_size: int) -> int:
    return 5 * len(values) + 4 * -(-len(values) // block_size)


def _compared(found: Mapping[str, Variant], stopwatch: Stopwatch, rounds: int) -> dict[str, Any]:
    """Return each variant's seconds, bytes/s, and bytes/s relative to `copy_`."""
    seconds: dict[str, list[float]] = {name: [] for name in found}
    for name in in_turns(found, _WARM_UP + rounds):
        seconds[name].append(stopwatch.seconds(found[name]))
    seconds = {name: taken[_WARM_UP:] for name, taken in seconds.items()}
    speeds = {name: [found[name].nbytes / s for s in seconds[name]] for name in found}
    return {
        name: {
            "seconds": spread(seconds[name]),
            "bytes_per_s": spread(speeds[name]),
            "of_copy": spread([a / b for a, b in zip(speeds[name], speeds[_COPY], strict=True)]),
        }
        for name in found
    }
