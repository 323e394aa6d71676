"""dynamic8 on the CPU beside bitsandbytes, `torch.add_` and `copy_`, on the same values.

In every round each variant runs once, after a run to warm up, in a new order each time. Kernels
write into memory that is there; a whole call, ours as bitsandbytes', makes new tensors. glibc gives
large ones back to the system when they are freed, and gets new ones page by page, which can take
longer than all else: all is measured once so, and once with freed memory kept.
"""

import ctypes
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from statistics import median
from typing import Any

import bnb
import torch
from torch import Tensor

from figures import shown, spread
from paceline.codecs.blockwise import EightBit, table
from paceline.links.group import process_group
from paceline.native import Codebook, decode_into, encode_into
from ranks import DEADLINE_S, Variant, alternate, timed
from readme import table as markdown

_COUNT, _QUICK_COUNT = 16_000_000, 1_000_000
_ROUNDS, _QUICK_ROUNDS = 25, 3
_TYPE = "dynamic8"
_BLOCK_SIZES = (1024, 4096)  # our default, and bitsandbytes'
_SETS = ("avx512", "avx2", "portable")
_THEIRS, _ADDING = "bitsandbytes", "decode and add"
_ADD, _COPY = "torch: add_", "torch: copy_"
# A variant's name begins with what it does. Bytes are those that are read and written, per value.
_NBYTES = {"encode": 5, "decode": 5, _ADDING: 9, _ADD: 12, _COPY: 8}
_GOALS = {"encode": "10", "decode": "20"}  # times as fast as bitsandbytes
_GOAL_OF_ADDING = "0.70"

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of glibc's malloc.h

Runs = dict[str, Callable[[], object]]
Blocks = dict[str, list[list[float]]]


def measure(quick: bool) -> dict[str, Any]:
    """Return the seconds of all variants, and how they compare, for both ways to free memory."""
    count, rounds = (_QUICK_COUNT, _QUICK_ROUNDS) if quick else (_COUNT, _ROUNDS)
    values = torch.randn(count, generator=torch.Generator().manual_seed(0))
    runs = _kernels(values) | _whole_calls(values) | _bitsandbytes(values) | _torch(values)
    freed = {"given back": _compared(runs, rounds, count)}
    _keep_freed_memory()
    freed["kept"] = _compared(runs, rounds, count)
    return {"count": count, "threads": torch.get_num_threads(), "freed memory": freed}


def _keep_freed_memory() -> None:
    libc = ctypes.CDLL(None)
    libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1)
    libc.mallopt(_MMAP_MAX, 0)


def _compared(runs: Runs, rounds: int, count: int) -> dict[str, Any]:
    variants = [Variant(name, timed(run, 1), 1) for name, run in runs.items()]
    with process_group(DEADLINE_S) as group:
        blocks = alternate(variants, group, rounds, 1)
    return {
        "variants": {name: _speed(name, times, count) for name, times in blocks.items()},
        "over_bitsandbytes": _over_bitsandbytes(blocks),
        "bytes_of_add": {
            name: _faster(blocks, name, _ADD, _NBYTES[_ADDING] / _NBYTES[_ADD])
            for name in blocks
            if name.startswith(_ADDING)
        },
    }


def _kernels(values: Tensor) -> Runs:
    """Return the kernels of each instruction set, with our blocks."""
    block_size, one, threads = _BLOCK_SIZES[0], table(_TYPE), torch.get_num_threads()
    book = Codebook(one.magnitudes.tolist(), one.thresholds.tolist())
    codes = torch.empty(len(values), dtype=torch.uint8)
    scales = torch.empty(-(-len(values) // block_size))
    decoded, total = torch.empty_like(values), torch.zeros_like(values)
    encode = partial(encode_into, codes, scales, values, block_size, book, True, threads)
    decode = partial(decode_into, decoded, codes, scales, block_size, book, False, threads)
    add = partial(decode_into, total, codes, scales, block_size, book, True, threads)
    runs: Runs = {}
    for name in filter(_is_known, _SETS):
        runs[f"encode: {name}"] = partial(encode, name)
        runs[f"decode: {name}"] = partial(decode, name)
        runs[f"{_ADDING}: {name}"] = partial(add, name)
    return runs


def _is_known(instruction_set: str) -> bool:
    """Whether this processor has it."""
    nothing, no_codes = torch.empty(0), torch.empty(0, dtype=torch.uint8)
    book = Codebook([0.0, 1.0], [0.5])
    try:
        decode_into(nothing, no_codes, nothing, 1, book, False, 1, instruction_set)
    except ValueError:
        return False
    return True


def _whole_calls(values: Tensor) -> Runs:
    runs: Runs = {}
    for block_size in _BLOCK_SIZES:
        codec = EightBit(_TYPE, block_size)
        payload, by = codec.encode(values), f"whole call, blocks of {block_size}"
        runs[f"encode: {by}"] = partial(codec.encode, values)
        runs[f"decode: {by}"] = partial(codec.decode, payload)
    return runs


def _bitsandbytes(values: Tensor) -> Runs:
    functional = bnb.functional()
    runs: Runs = {}
    for block_size in _BLOCK_SIZES if functional else ():
        codes, state = functional.quantize_blockwise(values, blocksize=block_size)
        encode, decode = functional.quantize_blockwise, functional.dequantize_blockwise
        by = f"{_THEIRS}, blocks of {block_size}"
        runs[f"encode: {by}"] = partial(encode, values, blocksize=block_size)
        runs[f"decode: {by}"] = partial(decode, codes, state)
    return runs


def _torch(values: Tensor) -> Runs:
    copied, total = torch.empty_like(values), torch.zeros_like(values)
    return {_ADD: partial(total.add_, values), _COPY: partial(copied.copy_, values)}


def _speed(name: str, times: list[list[float]], count: int) -> dict[str, Any]:
    seconds = list(chain.from_iterable(times))
    nbytes = _NBYTES.get(name) or _NBYTES[name.partition(":")[0]]
    return {
        "seconds": spread(seconds),
        "values_per_s": spread([count / one for one in seconds]),
        "bytes_per_s": spread([nbytes * count / one for one in seconds]),
    }


def _over_bitsandbytes(blocks: Blocks) -> dict[str, dict[str, Any]]:
    """Return how many times as fast as each of bitsandbytes' variants each of ours is."""
    rows: dict[str, dict[str, Any]] = {}
    for name in blocks:
        operation, _, by = name.partition(": ")
        theirs = [other for other in blocks if other.startswith(f"{operation}: {_THEIRS}")]
        if theirs and not by.startswith(_THEIRS):
            rows[name] = {
                other.partition(": ")[2]: _faster(blocks, name, other) for other in theirs
            }
    return rows


def _faster(blocks: Blocks, name: str, other: str, scale: float = 1.0) -> dict[str, Any]:
    """Return the other's seconds by this one's, times `scale`: of the medians, and by rounds."""
    own, others = (list(chain.from_iterable(blocks[one])) for one in (name, other))
    return {
        "ratio_of_medians": scale * median(others) / median(own),
        "ratio": spread([scale * theirs / ours for ours, theirs in zip(own, others, strict=True)]),
    }


def text(figures: dict[str, Any]) -> str:
    """Return the tables."""
    what = f"{_TYPE}, {figures['count']:,} float32, {figures['threads']} threads"
    return "\n\n".join(
        part
        for how, compared in figures["freed memory"].items()
        for part in _tables(f"{what}, freed memory {how}", compared)
    )


def _tables(title: str, compared: dict[str, Any]) -> Iterator[str]:
    yield markdown(
        title,
        ("variant", "ms, median [quartiles]", "G values/s", "GB/s, read and written"),
        [
            (
                name,
                shown(row["seconds"], 1e3, 2),
                f"{row['values_per_s']['median'] / 1e9:.2f}",
                f"{row['bytes_per_s']['median'] / 1e9:.1f}",
            )
            for name, row in compared["variants"].items()
        ],
    )
    if compared["over_bitsandbytes"]:
        yield _of_bitsandbytes(compared["over_bitsandbytes"])
    yield markdown(
        "Bytes a second, by those of torch's `add_`",
        ("variant", "ratio of medians", "round by round", "asked for"),
        [
            (name, f"{row['ratio_of_medians']:.2f}", shown(row["ratio"], 1, 2), _GOAL_OF_ADDING)
            for name, row in compared["bytes_of_add"].items()
        ],
    )


def _of_bitsandbytes(rows: dict[str, dict[str, Any]]) -> str:
    head = ["variant"]
    for theirs in next(iter(rows.values())):
        head += [theirs.partition(", ")[2], "round by round"]
    lines = []
    for name, by_theirs in rows.items():
        line = [name]
        for row in by_theirs.values():
            line += [f"{row['ratio_of_medians']:.1f}", shown(row["ratio"], 1, 1)]
        lines.append([*line, _GOALS[name.partition(":")[0]]])
    return markdown("Times as fast as bitsandbytes", [*head, "asked for"], lines)
