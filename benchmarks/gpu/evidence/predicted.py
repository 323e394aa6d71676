"""Compare the step that `paceline train` predicts on one GPU with its measured step.

Of two epochs, the first runs without a recorder.
"""

from part import Part, PartFailedError

from command import paceline

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


def run(part: Part) -> None:
    """Train each model on the first GPU."""
    for name, (size, samples, steps) in (_SMOKE_MODELS if part.smoke else _MODELS).items():
        found = paceline(
            *("train", name, "--workers", 1, "--batch-size", size, "--epochs", 2),
            *("--data", f"synthetic:{samples},samples={size * steps}"),
            *("--profile-s", 0.5 if part.smoke else 3),
        )
        if (device := found["machine"]["device"]) != part.device.name:
            raise PartFailedError(f"measured on {device!r} instead of {part.device.name!r}")
        predicted_s, measured_s = found["predicted_step_s"], found["step_s"]
        line = (
            f"predicted {predicted_s * 1e3:.2f} ms, measured {measured_s * 1e3:.2f} ms: "
            f"{predicted_s / measured_s - 1:+.1%}, {len(found['faults'])} faults against the plan"
        )
        part.keep(f"{name}, {size} samples", {field: found[field] for field in _FIELDS}, line)
