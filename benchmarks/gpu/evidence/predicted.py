"""The step that `paceline train` predicts on one GPU, beside the one that it then measures."""

from typing import Any

from evidence.commands import paceline, require_gpu
from part import Part

# The batch size, the shape and classes of samples, and the steps of an epoch.
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


def run(part: Part) -> None:
    """Train each model for two epochs: the first is measured without a recorder."""
    for name, (batch_size, samples, steps) in (_SMOKE_MODELS if part.smoke else _MODELS).items():
        found = paceline(
            *("train", name, "--workers", "1", "--batch-size", str(batch_size), "--epochs", "2"),
            *("--data", f"synthetic:{samples},samples={batch_size * steps}"),
            *("--profile-s", "0.5" if part.smoke else "3"),
        )
        require_gpu(part, found["machine"])
        figures = {field: found[field] for field in _FIELDS}
        part.keep(f"{name}, {batch_size} samples", figures, _line(figures))


def _line(found: dict[str, Any]) -> str:
    predicted_s, measured_s = found["predicted_step_s"], found["step_s"]
    faults = len(found["faults"])
    return (
        f"predicted {predicted_s * 1e3:.2f} ms, measured {measured_s * 1e3:.2f} ms: "
        f"{predicted_s / measured_s - 1:+.1%}, {faults} faults against the plan"
    )
