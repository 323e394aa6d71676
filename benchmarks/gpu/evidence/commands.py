"""Run `paceline probe`, `profile` and `train` on GPUs, and keep their results."""

from typing import Any

from part import Part, PartFailedError

from command import paceline
from paceline.core.machine import DeviceKind

_BATCH_SIZES = {"lenet5": 64, "alexnet": 128, "resnet50": 64}
_STEPS, _SMOKE_STEPS = 20, 4
# Batch size, shape and classes of samples, steps per epoch.
_MODELS = {
    "lenet5": (64, "1x32x32,classes=10", 60),
    "alexnet": (128, "3x227x227,classes=1000", 12),
    "resnet50": (32, "3x224x224,classes=1000", 32),
}
_SMOKE_MODELS = {"lenet5": (4, "1x32x32,classes=10", 8)}
_FIELDS = (
    *("predicted_step_s", "step_s", "lower_quartile_s", "upper_quartile_s", "samples_per_s"),
    *("comparison", "faults", "plans", "peak_memory_bytes", "machine"),
)


def probe(part: Part) -> None:
    """Measure the speed of all GPUs, the memory, the links and the codecs."""
    seconds = 0.5 if part.smoke else 10
    machine = paceline("probe", "--seconds", seconds, "--output", "machine.toml")["machine"]
    devices = [
        f"{one['name']} {one['flops_per_s'] / 1e12:.3g} TFLOP/s, "
        f"{one['memory_bandwidth_bytes_per_s'] / 1e9:.3g} GB/s"
        for one in machine["devices"]
    ]
    links = [
        f"{'--'.join(one['between'])} {one['bandwidth_bytes_per_s'] / 1e9:.3g} GB/s"
        for one in machine["links"]
    ]
    part.keep("machine", machine, "; ".join([*devices, *links]))
    kinds = [one["kind"] for one in machine["devices"]]
    if kinds != [DeviceKind.GPU] * len(part.gpus):
        raise PartFailedError(f"expected {len(part.gpus)} probed GPUs, got {kinds}")


def profile(part: Part) -> None:
    """Profile each model on one GPU."""
    steps = _SMOKE_STEPS if part.smoke else _STEPS
    for name, size in {"lenet5": 4}.items() if part.smoke else _BATCH_SIZES.items():
        found = paceline("profile", name, "--batch-size", size, "--steps", steps)
        _require_gpu(part, found["machine"])
        step_s, kernels_s = found["step"]["median_s"], found["kernels_s"]
        kernels = "" if kernels_s is None else f", kernels run for {kernels_s / step_s:.0%} of it"
        memory = found["memory"]["predicted"] / found["memory"]["measured"] - 1
        line = f"{step_s * 1e3:.2f} ms a step, recording {found['cost']:+.1%}{kernels}"
        part.keep(f"{name}, {size} samples", found, f"{line}, predicted memory {memory:+.0%}")


def predicted(part: Part) -> None:
    """Compare predicted and measured steps; of two epochs, the first runs without a recorder."""
    for name, (size, samples, steps) in (_SMOKE_MODELS if part.smoke else _MODELS).items():
        found = paceline(
            *("train", name, "--workers", 1, "--batch-size", size, "--epochs", 2),
            *("--data", f"synthetic:{samples},samples={size * steps}"),
            *("--profile-s", 0.5 if part.smoke else 3),
        )
        _require_gpu(part, found["machine"])
        predicted_s, measured_s = found["predicted_step_s"], found["step_s"]
        line = (
            f"predicted {predicted_s * 1e3:.2f} ms, measured {measured_s * 1e3:.2f} ms: "
            f"{predicted_s / measured_s - 1:+.1%}, {len(found['faults'])} faults against the plan"
        )
        part.keep(f"{name}, {size} samples", {field: found[field] for field in _FIELDS}, line)


def _require_gpu(part: Part, facts: dict[str, Any]) -> None:
    """Raise PartFailedError unless a result was measured on the first GPU."""
    if (device := facts["device"]) != part.device.name:
        raise PartFailedError(f"measured on {device!r} instead of {part.device.name!r}")
