"""Time codecs on the CPU against bitsandbytes, `torch.add_` and `copy_`, on the same values.

Each round runs every variant once, after a warm-up run, in a new random order. Kernels write into
existing tensors; whole calls, of ours and bitsandbytes, allocate new tensors. glibc returns large
freed tensors to the system and gets new memory page by page, which can take longer than the call
itself. Therefore everything is measured twice: with this default, and with freed memory kept.
"""

import ctypes
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from figures import shown, spread
from figures import table as markdown
from paceline.codecs.blockwise import EightBit
from paceline.codecs.names import find_codec
from paceline.codecs.quantization import table
from paceline.links.rendezvous import process_group
from paceline.native import Codebook
from ranks import DEADLINE_S, Variant, alternate, timed

_COUNT, _QUICK_COUNT = 16_000_000, 1_000_000
_ROUNDS, _QUICK_ROUNDS = 25, 3
_TYPE = "dynamic8"
_OTHER_TYPES = {"e3m0": 0.5, "dynamic4": 0.5, "half": 2.0, "bfloat16": 2.0}  # bytes per value
_BLOCK_SIZES = (1024, 4096)  # our default, and bitsandbytes'
_SETS = ("avx512", "avx2", "portable")
_THEIRS = "bitsandbytes"
_FLOAT32 = 4.0  # bytes per value
_INSTALL = "pip install --no-deps --target build/bitsandbytes -r benchmarks/codecs/requirements.txt"
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of glibc's malloc.h


class Timed(NamedTuple):
    """A function to time, and the bytes per value that it reads and writes."""

    run: Callable[[], object]
    nbytes: float


def measure(quick: bool) -> dict[str, Any]:
    """Return seconds and ratios to bitsandbytes, with freed memory returned and kept."""
    count, rounds = (_QUICK_COUNT, _QUICK_ROUNDS) if quick else (_COUNT, _ROUNDS)
    values = torch.randn(count, generator=torch.Generator().manual_seed(0))
    runs = dict(chain.from_iterable(of(values) for of in _GROUPS))
    freed = {"given back": _compared(runs, rounds, count)}
    _keep_freed_memory()
    freed["kept"] = _compared(runs, rounds, count)
    return {"count": count, "threads": torch.get_num_threads(), "freed memory": freed}


def _keep_freed_memory() -> None:
    libc = ctypes.CDLL(None)
    libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1)
    libc.mallopt(_MMAP_MAX, 0)


def _kernels(values: Tensor) -> Iterator[tuple[str, Timed]]:
    """Yield the kernels for each instruction set, with our default block size."""
    block_size, threads, one = _BLOCK_SIZES[0], torch.get_num_threads(), table(_TYPE)
    native = Codebook(one.magnitudes.tolist(), one.thresholds.tolist())
    codes = torch.empty(len(values), dtype=torch.uint8)
    scales = torch.empty(-(-len(values) // block_size))
    decoded, total = torch.empty_like(values), torch.zeros_like(values)
    encode = partial(native.encode_into, codes, scales, values, block_size, True, threads)
    decode = partial(native.decode_into, decoded, codes, scales, block_size, False, threads)
    add = partial(native.decode_into, total, codes, scales, block_size, True, threads)
    for known in filter(_is_known, _SETS):
        yield f"encode: {known}", Timed(partial(encode, known), _FLOAT32 + 1)
        yield f"decode: {known}", Timed(partial(decode, known), _FLOAT32 + 1)
        yield f"decode and add: {known}", Timed(partial(add, known), 2 * _FLOAT32 + 1)


def _is_known(instruction_set: str) -> bool:
    """Whether this processor supports the instruction set."""
    nothing, no_codes = torch.empty(0), torch.empty(0, dtype=torch.uint8)
    book = Codebook([0.0, 1.0], [0.5])
    try:
        book.decode_into(nothing, no_codes, nothing, 1, False, 1, instruction_set)
    except ValueError:
        return False
    return True


def _whole_calls(values: Tensor) -> Iterator[tuple[str, Timed]]:
    known: dict[str, tuple[Any, float]] = {
        f"whole call, blocks of {size}": (EightBit(_TYPE, size), 1.0) for size in _BLOCK_SIZES
    }
    for name, nbytes in _OTHER_TYPES.items():
        known[f"{name}, whole call"] = find_codec(name), nbytes
    for by, (codec, nbytes) in known.items():
        payload = codec.encode(values)
        yield f"encode: {by}", Timed(partial(codec.encode, values), _FLOAT32 + nbytes)
        yield f"decode: {by}", Timed(partial(codec.decode, payload), _FLOAT32 + nbytes)


def _bitsandbytes(values: Tensor) -> Iterator[tuple[str, Timed]]:
    if find_spec(_THEIRS) is None:
        print(f"{_THEIRS} is left out, because it is not installed: {_INSTALL}", flush=True)
        return
    functional = import_module(f"{_THEIRS}.functional")
    for block_size in _BLOCK_SIZES:
        encode = partial(functional.quantize_blockwise, values, blocksize=block_size)
        decode = partial(functional.dequantize_blockwise, *encode())
        by = f"{_THEIRS}, blocks of {block_size}"
        yield f"encode: {by}", Timed(encode, _FLOAT32 + 1)
        yield f"decode: {by}", Timed(decode, _FLOAT32 + 1)


def _torch(values: Tensor) -> Iterator[tuple[str, Timed]]:
    copied, total = torch.empty_like(values), torch.zeros_like(values)
    yield "torch: add_", Timed(partial(total.add_, values), 3 * _FLOAT32)
    yield "torch: copy_", Timed(partial(copied.copy_, values), 2 * _FLOAT32)


_GROUPS = (_kernels, _whole_calls, _bitsandbytes, _torch)


def _compared(runs: Mapping[str, Timed], rounds: int, count: int) -> dict[str, Any]:
    variants = [Variant(name, timed(one.run, 1), 1) for name, one in runs.items()]
    with process_group(DEADLINE_S) as group:
        blocks = alternate(variants, group, rounds, 1)
    seconds = {name: list(chain.from_iterable(times)) for name, times in blocks.items()}
    rows = {
        name: {
            "seconds": spread(own),
            "values_per_s": spread([count / one for one in own]),
            "bytes_per_s": spread([runs[name].nbytes * count / one for one in own]),
        }
        for name, own in seconds.items()
    }
    return {"variants": rows, "over_bitsandbytes": _over_bitsandbytes(seconds)}


def _over_bitsandbytes(seconds: Mapping[str, list[float]]) -> dict[str, dict[str, Any]]:
    """Return the speedups of our variants of the same type over each variant of bitsandbytes."""
    rows: dict[str, dict[str, Any]] = {}
    for name, own in seconds.items():
        operation, _, by = name.partition(": ")
        if by.startswith((_THEIRS, *_OTHER_TYPES)):
            continue
        for other, theirs in seconds.items():
            if other.startswith(f"{operation}: {_THEIRS}"):
                rows.setdefault(name, {})[other.partition(": ")[2]] = {
                    "ratio_of_medians": median(theirs) / median(own),
                    "ratio": spread([a / b for a, b in zip(theirs, own, strict=True)]),
                }
    return rows


def text(figures: dict[str, Any]) -> str:
    """Return the tables."""
    what = f"{_TYPE} where no other type is named, {figures['count']:,} float32"
    what += f", {figures['threads']} threads"
    return "\n\n".join(
        part
        for how, compared in figures["freed memory"].items()
        for part in _tables(f"{what}, freed memory {how}", compared)
    )


def _tables(title: str, compared: dict[str, Any]) -> Iterator[str]:
    lines = [
        (
            name,
            shown(row["seconds"], 1e3, 2),
            f"{row['values_per_s']['median'] / 1e9:.2f}",
            f"{row['bytes_per_s']['median'] / 1e9:.1f}",
        )
        for name, row in compared["variants"].items()
    ]
    head = ("variant", "ms, median [quartiles]", "G values/s", "GB/s, read and written")
    yield markdown(title, head, lines)
    if rows := compared["over_bitsandbytes"]:
        blocks = [theirs.partition(", ")[2] for theirs in next(iter(rows.values()))]
        ratios = [
            (name, *(cell for row in own.values() for cell in _ratios(row)))
            for name, own in rows.items()
        ]
        columns = (column for one in blocks for column in (one, "round by round"))
        yield markdown("Times as fast as bitsandbytes", ("variant", *columns), ratios)


def _ratios(row: dict[str, Any]) -> tuple[str, str]:
    return f"{row['ratio_of_medians']:.1f}", shown(row["ratio"], 1, 1)
