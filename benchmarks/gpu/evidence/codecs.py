"""Measure the codec dynamic8 on a GPU against `copy_`.

In each round, each variant runs once on the same 64 M values, in random order. GPU events time
kernels; a matrix product keeps the GPU busy until the host has queued them. The host's clock times
a "whole call" of the public function, which also waits for the number of non-finite values. Bytes
are the minimum read and written per value: 5 to encode or decode (float32 and code), 9 to decode
and add, 8 for `copy_`; codecs add 4 per block for its scale.
"""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from part import Part, PartFailedError
from torch import Tensor

from figures import shown, spread
from paceline.codecs.blockwise import EightBit
from paceline.codecs.kernels import has_triton
from paceline.codecs.quantization import EncodedBlocks, table
from paceline.links.devices import Device
from ranks import in_turns

_COUNT, _SMOKE_COUNT = 64_000_000, 4_000
_TYPE, _BLOCK_SIZE = "dynamic8", 1024
_WARM_UP, _ROUNDS, _SMOKE_ROUNDS = 5, 50, 2
_BUSY_SIDE = 4096  # of matrices whose product lasts a few milliseconds on a GPU
_COPY = "copy_"


class Variant(NamedTuple):
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
    found = {_COPY: Variant(partial(torch.empty_like(values).copy_, values), 8 * count)}
    found |= _whole_calls(values)
    found |= kernels(values) if has_triton(values) else {}
    stopwatch = Stopwatch(part.device, 8 if part.smoke else _BUSY_SIDE)
    figures = _compared(found, stopwatch, rounds)
    part.keep(f"{count:,} values", figures, _line(figures))
    if part.device.has_triton and not has_triton(values):
        raise PartFailedError("Triton, or the C compiler that it needs, is not installed here")


def _line(figures: Mapping[str, Any]) -> str:
    copied = f"copy_ {figures[_COPY]['bytes_per_s']['median'] / 1e9:.0f} GB/s"
    ways = (
        f"{name} {shown(row['of_copy'], 1, 2)} of it"
        for name, row in figures.items()
        if name != _COPY
    )
    return "; ".join([copied, *ways])


def kernels(values: Tensor) -> dict[str, Variant]:
    """Return the Triton kernels; decoding writes to existing tensors."""
    from paceline.codecs import triton_kernels

    one, nbytes = table(_TYPE), _nbytes(values)
    codes, scales, _ = triton_kernels.encode(values, None, _BLOCK_SIZE, one)
    encoded = EncodedBlocks(codes, scales, _BLOCK_SIZE, one)
    target, total = torch.empty_like(values), torch.zeros_like(values)

    def decode(into: Tensor, adds: bool) -> Callable[[], object]:
        return lambda: triton_kernels.decode(into, encoded, adds)

    return {
        f"{_TYPE}, encode": Variant(
            lambda: triton_kernels.encode(values, None, _BLOCK_SIZE, one), nbytes
        ),
        f"{_TYPE}, decode": Variant(decode(target, False), nbytes),
        f"{_TYPE}, decode and add": Variant(decode(total, True), nbytes + 4 * len(values)),
    }


def _whole_calls(values: Tensor) -> dict[str, Variant]:
    """Return the public encode and decode functions, which allocate their results."""
    codec, nbytes = EightBit(_TYPE, _BLOCK_SIZE), _nbytes(values)
    runs = {"encode": partial(codec.encode, values)}
    runs["decode"] = partial(codec.decode, codec.encode(values))
    name = f"{_TYPE}, blocks of {_BLOCK_SIZE}"
    return {f"{name}, {way}": Variant(run, nbytes, is_whole_call=True) for way, run in runs.items()}


def _nbytes(values: Tensor) -> int:
    return 5 * len(values) + 4 * -(-len(values) // _BLOCK_SIZE)


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
