"""`paceline profile`: where a step goes, and whether what it says of itself adds up."""

from typing import Any

from evidence.commands import paceline, require_gpu
from part import Part

_BATCH_SIZES = {"lenet5": 64, "alexnet": 128, "resnet50": 64}
_STEPS, _SMOKE_STEPS = 20, 4


def run(part: Part) -> None:
    """Profile each model on one GPU."""
    for name, batch_size in {"lenet5": 4}.items() if part.smoke else _BATCH_SIZES.items():
        steps = str(_SMOKE_STEPS if part.smoke else _STEPS)
        found = paceline("profile", name, "--batch-size", str(batch_size), "--steps", steps)
        require_gpu(part, found["machine"])
        part.keep(f"{name}, {batch_size} samples", found, _line(found))


def _line(found: dict[str, Any]) -> str:
    step_s, kernels_s = found["step"]["median_s"], found["kernels_s"]
    kernels = "" if kernels_s is None else f", kernels run for {kernels_s / step_s:.0%} of it"
    memory = found["memory"]["predicted"] / found["memory"]["measured"] - 1
    return (
        f"{step_s * 1e3:.2f} ms a step, recording {found['cost']:+.1%}{kernels}, "
        f"predicted memory {memory:+.0%}"
    )
