"""Time codecs on the CPU against bitsandbytes, `torch.add_` and `copy_`, on the same values.

Each round runs every variant once, after a warm-up run, in a new random order. Kernels write into
existing tensors; whole calls, of ours and bitsandbytes, allocate new tensors. malloc keeps freed
memory, as in Paceline's ranks: page faults of a new tensor would take longer than its decoding.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from statistics import median
from typing import Any

import torch
from torch import Tensor

from figures import shown, spread
from figures import table as markdown
from paceline.codecs.names import find_codec
from paceline.codecs.quantization import table
from paceline.links.memory import keep_memory
from paceline.links.rendezvous import process_group
from paceline.native import Codebook
from ranks import DEADLINE_S, Variant, alternate, timed

_COUNT, _ROUNDS = 16_000_000, 25
_QUICK_COUNT, _QUICK_ROUNDS = 1_000_000, 3
_TYPE = "dynamic8"
_TYPES = {_TYPE: 1.0, "e3m0": 0.5, "half": 2.0}  # bytes per value
_BLOCK_SIZE = 1024
_SETS = ("avx512", "avx2", "portable")
_THEIRS = "bitsandbytes"
_FLOAT32 = 4.0  # bytes per value
Timed = tuple[Callable[[], object], float]  # and the bytes per value that it reads and writes


def measure(quick: bool) -> dict[str, Any]:
    """Return each variant's seconds and bytes per value, and its ratios to bitsandbytes."""
    keep_memory()
    count, rounds = (_QUICK_COUNT, _QUICK_ROUNDS) if quick else (_COUNT, _ROUNDS)
    values = torch.randn(count, generator=torch.Generator().manual_seed(0))
    groups = (_kernels, _whole_calls, _bitsandbytes, _torch)
    runs = dict(chain.from_iterable(of(values) for of in groups))
    variants = [Variant(name, timed(run, 1), 1) for name, (run, _) in runs.items()]
    with process_group(DEADLINE_S) as group:
        blocks = alternate(variants, group, rounds, 1)
    seconds = {name: list(chain.from_iterable(times)) for name, times in blocks.items()}
    return {
        "count": count,
        "threads": torch.get_num_threads(),
        "variants": {
            name: {"seconds": spread(own), "nbytes": runs[name][1]} for name, own in seconds.items()
        },
        "over_bitsandbytes": dict(_over_bitsandbytes(seconds)),
    }


def _kernels(values: Tensor) -> Iterator[tuple[str, Timed]]:
    """Yield the kernels for each instruction set that this processor supports."""
    threads, one = torch.get_num_threads(), table(_TYPE)
    native = Codebook(one.magnitudes.tolist(), one.thresholds.tolist())
    codes = torch.empty(len(values), dtype=torch.uint8)
    scales = torch.empty(-(-len(values) // _BLOCK_SIZE))
    decoded, total = torch.empty_like(values), torch.zeros_like(values)
    encode = partial(native.encode_into, codes, scales, values, _BLOCK_SIZE, True, threads)
    decode = partial(native.decode_into, decoded, codes, scales, _BLOCK_SIZE, False, threads)
    add = partial(native.decode_into, total, codes, scales, _BLOCK_SIZE, True, threads)
    for known in _SETS:
        try:
            encode(known)
        except ValueError:
            continue
        yield f"encode: {known}", (partial(encode, known), _FLOAT32 + 1)
        yield f"decode: {known}", (partial(decode, known), _FLOAT32 + 1)
        yield f"decode and add: {known}", (partial(add, known), 2 * _FLOAT32 + 1)


def _whole_calls(values: Tensor) -> Iterator[tuple[str, Timed]]:
    for name, nbytes in _TYPES.items():
        codec = find_codec(name)
        payload = codec.encode(values)
        yield f"encode: {name}, whole call", (partial(codec.encode, values), _FLOAT32 + nbytes)
        yield f"decode: {name}, whole call", (partial(codec.decode, payload), _FLOAT32 + nbytes)


def _bitsandbytes(values: Tensor) -> Iterator[tuple[str, Timed]]:
    if find_spec(_THEIRS) is None:
        print(f"{_THEIRS} is left out: see benchmarks/codecs/requirements.txt", flush=True)
        return
    functional = import_module(f"{_THEIRS}.functional")
    encode = partial(functional.quantize_blockwise, values, blocksize=_BLOCK_SIZE)
    decode = partial(functional.dequantize_blockwise, *encode())
    yield f"encode: {_THEIRS}", (encode, _FLOAT32 + 1)
    yield f"decode: {_THEIRS}", (decode, _FLOAT32 + 1)


def _torch(values: Tensor) -> Iterator[tuple[str, Timed]]:
    copied, total = torch.empty_like(values), torch.zeros_like(values)
    yield "torch: add_", (partial(total.add_, values), 3 * _FLOAT32)
    yield "torch: copy_", (partial(copied.copy_, values), 2 * _FLOAT32)


def _over_bitsandbytes(seconds: Mapping[str, list[float]]) -> Iterator[tuple[str, Any]]:
    """Yield the speed-up of each variant of the same type over bitsandbytes."""
    for name, own in seconds.items():
        operation, _, by = name.partition(": ")
        theirs = seconds.get(f"{operation}: {_THEIRS}")
        if theirs is not None and by.startswith((*_SETS, _TYPE)):
            ratios = [a / b for a, b in zip(theirs, own, strict=True)]
            yield name, {"of_medians": median(theirs) / median(own), "ratio": spread(ratios)}


def text(figures: dict[str, Any]) -> str:
    """Return the table."""
    over = figures["over_bitsandbytes"]
    lines = []
    for name, row in figures["variants"].items():
        per_s = figures["count"] / row["seconds"]["median"] / 1e9
        rates = f"{per_s:.2f}", f"{row['nbytes'] * per_s:.1f}"
        ratios = ("", "")
        if name in over:
            ratios = f"{over[name]['of_medians']:.1f}", shown(over[name]["ratio"], 1, 1)
        lines.append((name, shown(row["seconds"], 1e3, 2), *rates, *ratios))
    title = f"{_TYPE} where no other type is named, {figures['count']:,} float32"
    rates = ("G values/s", "GB/s, read and written")
    head = ("variant", "ms, median [quartiles]", *rates, f"times {_THEIRS}", "round by round")
    return markdown(f"{title}, {figures['threads']} threads", head, lines)
