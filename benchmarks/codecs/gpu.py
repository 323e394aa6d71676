"""How fast 8-bit codes are on a GPU, beside copying; writes gpu.json.

    python benchmarks/codecs/gpu.py [--quick]

In every round each variant runs once, in a new order each time, on the same 64 M values. Times are
the GPU's: it is kept busy until the host has handed all over. Bytes are those that are read and
written at least: 4 and 1 a value to encode, 1 and 4 to decode, 9 to decode and add, 8 for `copy_`;
and 4 a block for its scale. "whole call" is `encode` as users call it, by the host's clock: it also
waits for the number of values that are not finite. Without a GPU, or without Triton, it ends with
exit code 2.
"""

import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import torch  # noqa: E402

from figures import shown, spread  # noqa: E402
from paceline.codecs.blockwise import TABLES, EightBit, has_triton, table  # noqa: E402  # noqa: E402
from paceline.measure.this_machine import facts  # noqa: E402

_COUNT, _QUICK_COUNT = 64_000_000, 1_000_000
_BLOCK_SIZE = 1024
_WARM_UP, _ROUNDS = 5, 50
_HEAD_START = 2_000_000  # cycles of the GPU: about 1 ms
_COPY = "copy_"


@dataclass(frozen=True)
class Variant:
    """Something to time, and the bytes that it moves."""

    run: Callable[[], object]
    nbytes: int
    by_host: bool = False

    def seconds(self) -> float:
        """Return how long it takes once."""
        torch.cuda.synchronize()
        if self.by_host:
            begun = time.perf_counter()
            self.run()
            torch.cuda.synchronize()
            return time.perf_counter() - begun
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_HEAD_START)
        begin.record()
        self.run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


def variants(count: int) -> dict[str, Variant]:
    """Return copying, and what each type does."""
    generator = torch.Generator("cuda").manual_seed(0)
    values = torch.randn(count, device="cuda", generator=generator)
    target = torch.empty_like(values)
    found = {_COPY: Variant(lambda: target.copy_(values), 8 * count)}
    for name in TABLES:
        for way, variant in _of_type(name, values, target).items():
            found[f"{name}, {way}"] = variant
    return found


def _of_type(name: str, values: torch.Tensor, target: torch.Tensor) -> dict[str, Variant]:
    from paceline.codecs import triton_kernels

    count, codec, one = len(values), EightBit(name, _BLOCK_SIZE), table(name)
    codes, scales, _ = triton_kernels.encode(values, None, _BLOCK_SIZE, one)
    total = torch.zeros_like(values)
    scales_nbytes = 4 * len(scales)

    def decode(into: torch.Tensor, adds: bool) -> Callable[[], object]:
        return lambda: triton_kernels.decode(into, codes, scales, _BLOCK_SIZE, one, adds)

    def encode() -> object:
        return triton_kernels.encode(values, None, _BLOCK_SIZE, one)

    return {
        "encode": Variant(encode, 5 * count + scales_nbytes),
        "decode": Variant(decode(target, False), 5 * count + scales_nbytes),
        "decode and add": Variant(decode(total, True), 9 * count + scales_nbytes),
        "encode, whole call": Variant(
            lambda: codec.encode(values), 5 * count + scales_nbytes, by_host=True
        ),
    }


def measure(count: int, rounds: int) -> dict[str, Any]:
    """Return seconds, bytes a second, and the share of copying's bytes a second, of all."""
    found = variants(count)
    order = random.Random(0)  # noqa: S311 - no secret
    seconds: dict[str, list[float]] = {name: [] for name in found}
    for round_ in range(_WARM_UP + rounds):
        for name in order.sample(list(found), len(found)):
            took = found[name].seconds()
            if round_ >= _WARM_UP:
                seconds[name].append(took)
    speeds = {name: [found[name].nbytes / s for s in seconds[name]] for name in found}
    return {
        name: {
            "seconds": spread(seconds[name]),
            "bytes_per_s": spread(speeds[name]),
            "of_copy": spread([a / b for a, b in zip(speeds[name], speeds[_COPY], strict=True)]),
        }
        for name in found
    }


def main() -> None:
    """Measure, print the table, and write gpu.json."""
    if not torch.cuda.is_available():
        _refuse("there is no CUDA device here")
    if not has_triton(torch.empty(0, device="cuda")):
        _refuse("Triton, or the C compiler that it needs, is not installed here")
    quick = "--quick" in sys.argv
    count, rounds = (_QUICK_COUNT, 3) if quick else (_COUNT, _ROUNDS)
    figures = measure(count, rounds)
    print(f"{count:,} values              ms [quartiles]              GB/s   share of copy_'s")
    for name, row in figures.items():
        speed = row["bytes_per_s"]["median"] / 1e9
        print(f"{name:29} {shown(row['seconds'], 1e3):27} {speed:5.0f}   {shown(row['of_copy'])}")
    if not quick:
        machine = facts(torch.device("cuda", 0)) | {
            "cuda": torch.version.cuda,
            "triton": version("triton"),
        }
        content = {"machine": machine, "count": count, "figures": figures}
        (HERE / "gpu.json").write_text(json.dumps(content, indent=2) + "\n")


def _refuse(why: str) -> None:
    print(f"gpu.py: {why}, so nothing is measured", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
