"""Measure the kernels of codec dynamic8 on a GPU against `copy_`.

In each round, each variant runs once on the same 64 M values, in random order. GPU events time
kernels; a matrix product keeps the GPU busy until the host has queued them. Bytes are the minimum
read and written per value: 5 to encode or decode (float32 and code), 9 to decode and add, 8 for
`copy_`; codecs add 4 per block for its scale.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from part import Part, PartFailedError
from torch import Tensor

from figures import shown, spread
from paceline.codecs.kernels import has_triton
from paceline.codecs.quantization import EncodedBlocks, table
from paceline.links.devices import Device
from ranks import in_turns

_COUNT, _SMOKE_COUNT = 64_000_000, 4_000
_TYPE, _BLOCK_SIZE = "dynamic8", 1024
_WARM_UP, _ROUNDS, _SMOKE_ROUNDS = 5, 50, 2
_BUSY_SIDE = 4096  # of matrices whose product lasts a few milliseconds on a GPU
_COPY = "copy_"
Variants = Mapping[str, tuple[Callable[[], object], int]]  # a kernel, and the bytes that it moves


def run(part: Part) -> None:
    """Measure all kernels."""
    count = _SMOKE_COUNT if part.smoke else _COUNT
    values = torch.randn(count, generator=torch.Generator().manual_seed(0))
    values = values.to(part.device.torch_device)
    variants = {_COPY: (partial(torch.empty_like(values).copy_, values), 8 * count)}
    variants |= _kernels(values) if has_triton(values) else {}
    figures = _compared(variants, part.device, smoke=part.smoke)
    ways = (
        f"{name} {shown(row['of_copy'], 1, 2)} of it"
        for name, row in figures.items()
        if name != _COPY
    )
    copied = f"copy_ {figures[_COPY]['bytes_per_s']['median'] / 1e9:.0f} GB/s"
    part.keep(f"{count:,} values", figures, "; ".join([copied, *ways]))
    if part.device.has_triton and not has_triton(values):
        raise PartFailedError("Triton, or the C compiler that it needs, is not installed here")


def _kernels(values: Tensor) -> Variants:
    """Return the Triton kernels; decoding writes to existing tensors."""
    from paceline.codecs import triton_kernels

    one, nbytes = table(_TYPE), 5 * len(values) + 4 * -(-len(values) // _BLOCK_SIZE)
    codes, scales, _ = triton_kernels.encode(values, None, _BLOCK_SIZE, one)
    encoded = EncodedBlocks(codes, scales, _BLOCK_SIZE, one)
    target, total = torch.empty_like(values), torch.zeros_like(values)
    return {
        f"{_TYPE}, encode": (
            lambda: triton_kernels.encode(values, None, _BLOCK_SIZE, one),
            nbytes,
        ),
        f"{_TYPE}, decode": (
            lambda: triton_kernels.decode(target, encoded, adds=False),
            nbytes,
        ),
        f"{_TYPE}, decode and add": (
            lambda: triton_kernels.decode(total, encoded, adds=True),
            nbytes + 4 * len(values),
        ),
    }


def _compared(variants: Variants, device: Device, *, smoke: bool) -> dict[str, Any]:
    """Return each variant's seconds, bytes/s, and bytes/s relative to `copy_`."""
    side = 8 if smoke else _BUSY_SIDE
    busy = torch.zeros(side, side, device=device.torch_device)
    product = torch.empty_like(busy)
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for name in in_turns(variants, _WARM_UP + (_SMOKE_ROUNDS if smoke else _ROUNDS)):
        device.synchronize()
        torch.mm(busy, busy, out=product)  # while the host queues the rest
        begin = device.record(timed=True)
        variants[name][0]()
        end = device.record(timed=True)
        end.synchronize()
        seconds[name].append(begin.elapsed_time(end) * 1e-3)
    speeds = {
        name: [variants[name][1] / s for s in own[_WARM_UP:]] for name, own in seconds.items()
    }
    return {
        name: {
            "seconds": spread(seconds[name][_WARM_UP:]),
            "bytes_per_s": spread(own),
            "of_copy": spread([a / b for a, b in zip(own, speeds[_COPY], strict=True)]),
        }
        for name, own in speeds.items()
    }
