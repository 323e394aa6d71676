"""Time codecs on the CPU against bitsandbytes, `torch.add_` and `copy_`, on the same values.

Each round runs every variant once, after a warm-up run, in a new random order. Kernels write into
existing tensors; whole calls, of ours and bitsandbytes, allocate new tensors. glibc returns large
freed tensors to the system and gets new memory page by page, which can take longer than the call
itself. Therefore everything is measured twice: with this default, and with freed memory kept.
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
from figures import table as markdown
from paceline.codecs.blockwise import EightBit, FourBit
from paceline.codecs.names import find_codec
from paceline.codecs.quantization import FOUR_BIT_TABLES, table
from paceline.links.rendezvous import process_group
from paceline.native import Codebook, DType, FourBitTable, cast_into
from ranks import DEADLINE_S, Variant, alternate, timed

_COUNT, _QUICK_COUNT = 16_000_000, 1_000_000
_ROUNDS, _QUICK_ROUNDS = 25, 3
_TYPE = "dynamic8"
_BLOCK_SIZES = (1024, 4096)  # our default, and bitsandbytes'
_SETS = ("avx512", "avx2", "portable")
_THEIRS, _ADDING = "bitsandbytes", "decode and add"
_THEIRS_IN_4_BITS = f"{_THEIRS} with 4 bits"
_THEIR_4_BIT_BLOCKS = (1024, 64)  # our default, and bitsandbytes'
_CASTS = {"half": DType.FLOAT16, "bfloat16": DType.BFLOAT16}
_ADD, _COPY = "torch: add_", "torch: copy_"
# A variant's name is its operation, and then its type unless that is dynamic8. Bytes per value that
# are read and written: _NBYTES counts float32, _ENCODED_NBYTES encoded values (default 1 byte).
_NBYTES = {"encode": 4.0, "decode": 4.0, _ADDING: 8.0, _ADD: 12.0, _COPY: 8.0}
_ENCODED_NBYTES = {
    **dict.fromkeys((*FOUR_BIT_TABLES, _THEIRS_IN_4_BITS), 0.5),
    **dict.fromkeys(_CASTS, 2.0),
}

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of glibc's malloc.h

Runs = dict[str, Callable[[], object]]
Blocks = dict[str, list[list[float]]]


def measure(quick: bool) -> dict[str, Any]:
    """Return seconds and ratios to bitsandbytes, with freed memory returned and kept."""
    count, rounds = (_QUICK_COUNT, _QUICK_ROUNDS) if quick else (_COUNT, _ROUNDS)
    values = torch.randn(count, generator=torch.Generator().manual_seed(0))
    runs = _kernels(values) | _whole_calls(values) | _bitsandbytes(values)
    for name in FOUR_BIT_TABLES:
        runs |= _kernels(values, name)
    runs |= _casts(values) | _other_whole_calls(values) | _bitsandbytes_4_bit(values)
    runs |= _torch(values)
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
        "over_bitsandbytes": _over_bitsandbytes(blocks, ("",), f"{_THEIRS},"),
        "over_bitsandbytes_4_bit": _over_bitsandbytes(
            blocks, tuple(FOUR_BIT_TABLES), _THEIRS_IN_4_BITS
        ),
    }


def _kernels(values: Tensor, name: str = "") -> Runs:
    """Return a type's kernels for each instruction set, with our default block size."""
    block_size, threads = _BLOCK_SIZES[0], torch.get_num_threads()
    one = table(name or _TYPE)
    native = (FourBitTable if name else Codebook)(one.magnitudes.tolist(), one.thresholds.tolist())
    codes = torch.empty(-(-len(values) // (2 if name else 1)), dtype=torch.uint8)
    scales = torch.empty(-(-len(values) // block_size))
    decoded, total = torch.empty_like(values), torch.zeros_like(values)
    encode = partial(native.encode_into, codes, scales, values, block_size, True, threads)
    decode = partial(native.decode_into, decoded, codes, scales, block_size, False, threads)
    add = partial(native.decode_into, total, codes, scales, block_size, True, threads)
    runs: Runs = {}
    for known in filter(_is_known, _SETS):
        by = f"{name}, {known}" if name else known
        runs[f"encode: {by}"] = partial(encode, known)
        runs[f"decode: {by}"] = partial(decode, known)
        runs[f"{_ADDING}: {by}"] = partial(add, known)
    return runs


def _casts(values: Tensor) -> Runs:
    """Return the casts to 16-bit types."""
    rounded, threads = torch.empty(2 * len(values), dtype=torch.uint8), torch.get_num_threads()
    return {
        f"encode: {name}, {known}": partial(cast_into, rounded, values, dtype, threads, known)
        for name, dtype in _CASTS.items()
        for known in filter(_is_known, _SETS)
    }


def _is_known(instruction_set: str) -> bool:
    """Whether this processor supports the instruction set."""
    nothing, no_codes = torch.empty(0), torch.empty(0, dtype=torch.uint8)
    book = Codebook([0.0, 1.0], [0.5])
    try:
        book.decode_into(nothing, no_codes, nothing, 1, False, 1, instruction_set)
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


def _other_whole_calls(values: Tensor) -> Runs:
    """Return whole calls that encode and decode 4-bit types and casts."""
    runs: Runs = {}
    for name in (*FOUR_BIT_TABLES, *_CASTS):
        codec = FourBit(name) if name in FOUR_BIT_TABLES else find_codec(name)
        payload = codec.encode(values)
        runs[f"encode: {name}, whole call"] = partial(codec.encode, values)
        runs[f"decode: {name}, whole call"] = partial(codec.decode, payload)
    return runs


def _bitsandbytes_4_bit(values: Tensor) -> Runs:
    """Return bitsandbytes' 4-bit calls; print a message and return {} without CPU support."""
    functional, runs = bnb.functional(), Runs()
    for block_size in _THEIR_4_BIT_BLOCKS if functional else ():
        encode = partial(functional.quantize_4bit, values, blocksize=block_size, quant_type="fp4")
        try:
            codes, state = encode()
            functional.dequantize_4bit(codes, state)
        except (RuntimeError, NotImplementedError) as error:
            print(f"bitsandbytes' 4 bits are left out: {error}", flush=True)
            return {}
        by = f"{_THEIRS_IN_4_BITS}, blocks of {block_size}"
        runs[f"encode: {by}"] = encode
        runs[f"decode: {by}"] = partial(functional.dequantize_4bit, codes, state)
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
    nbytes = _NBYTES.get(name) or _NBYTES[name.partition(":")[0]] + _encoded_nbytes(name)
    return {
        "seconds": spread(seconds),
        "values_per_s": spread([count / one for one in seconds]),
        "bytes_per_s": spread([nbytes * count / one for one in seconds]),
    }


def _type_of(name: str) -> str:
    """Return the type in a variant's name, or an empty string."""
    named = name.partition(": ")[2].partition(",")[0]
    return named if named in _ENCODED_NBYTES else ""


def _encoded_nbytes(name: str) -> float:
    return _ENCODED_NBYTES.get(_type_of(name), 1.0)


def _over_bitsandbytes(
    blocks: Blocks, types: tuple[str, ...], rival: str
) -> dict[str, dict[str, Any]]:
    """Return speedups over each variant of `rival`, for our variants of these types."""
    rows: dict[str, dict[str, Any]] = {}
    for name in blocks:
        operation, _, by = name.partition(": ")
        theirs = [other for other in blocks if other.startswith(f"{operation}: {rival}")]
        if theirs and _type_of(name) in types and not by.startswith(_THEIRS):
            rows[name] = {
                other.partition(": ")[2]: _faster(blocks, name, other) for other in theirs
            }
    return rows


def _faster(blocks: Blocks, name: str, other: str) -> dict[str, Any]:
    """Return `other`'s seconds divided by `name`'s: of medians, and round by round."""
    own, others = (list(chain.from_iterable(blocks[one])) for one in (name, other))
    return {
        "ratio_of_medians": median(others) / median(own),
        "ratio": spread([theirs / ours for ours, theirs in zip(own, others, strict=True)]),
    }


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
        yield _of_bitsandbytes(compared["over_bitsandbytes"], "Times as fast as bitsandbytes")
    if compared.get("over_bitsandbytes_4_bit"):
        rows, title = compared["over_bitsandbytes_4_bit"], "Times as fast as bitsandbytes' 4 bits"
        yield _of_bitsandbytes(rows, title)


def _of_bitsandbytes(rows: dict[str, dict[str, Any]], title: str) -> str:
    head = ["variant"]
    for theirs in next(iter(rows.values())):
        head += [theirs.partition(", ")[2], "round by round"]
    lines = []
    for name, by_theirs in rows.items():
        line = [name]
        for row in by_theirs.values():
            line += [f"{row['ratio_of_medians']:.1f}", shown(row["ratio"], 1, 1)]
        lines.append(line)
    return markdown(title, head, lines)
