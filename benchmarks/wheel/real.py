"""Train AlexNet with real arithmetic on two hosts of one core: 16 images per worker, 200 Mbit/s.

Wheel has one body, on the host without the hub, or one body on each host. DistributedDataParallel
has a rank on each host, without and with torch's fp16 hook.
"""

from typing import Any

from ddp import ALONE, FLOAT32, FP16
from hosts import TwoHosts
from hub_and_bodies import LANES, carried_out, idle, on_ranks

from figures import table

_MODEL = "paceline.training.models.networks:AlexNet"  # with 1,000 classes
_RATE, _SAMPLES = "200mbit", 16
_ENCODED = "gradients=dynamic8,parameters=half,activations=dynamic8,activation_gradients=dynamic8"
_CASES: dict[str, tuple[tuple[int, ...], str | None]] = {  # the host of each body, and the codecs
    "wheel, a body beside the hub's host": ((1,), None),
    "wheel, a body on each host": ((1, 0), None),
    "wheel, a body beside the hub's host, encoded": ((1,), _ENCODED),
    "wheel, a body on each host, encoded": ((1, 0), _ENCODED),
}


def measure(quick: bool) -> dict[str, Any]:
    """Return samples per second of all methods, and the idle shares of wheel's devices."""
    cases = list(_CASES.items())[: 2 if quick else None]
    with TwoHosts(_RATE) as hosts:
        wheels = {name: _wheel(hosts, *case, 6 if quick else 20) for name, case in cases}
        case = {"batch_size": _SAMPLES, "device": None, "hooks": [FP16], "blocks": 4, "steps": 1}
        rows = on_ranks(hosts, case, quick)
    for row in rows.values():
        row["samples_per_s"] = row["samples"] / row["seconds"]["median"]
    return {"wheel": wheels, "ddp": rows}


def _wheel(
    hosts: TwoHosts, bodies: tuple[int, ...], codec: str | None, steps: int
) -> dict[str, Any]:
    workers = LANES * len(bodies)
    batch = workers * _SAMPLES
    words = ["hub", _MODEL, "--data", f"synthetic:3x227x227,samples={batch * steps}"]
    words += ["--batch-size", str(batch), "--epochs", "1", "--momentum", "0.9"]
    words += ["--learning-rate", "0.0001", *(["--codec", codec] if codec else [])]
    result = carried_out(hosts, words, bodies)
    return {
        "samples_per_s": batch / result["step_s"],
        "predicted_samples_per_s": batch / result["predicted_step_s"],
        **idle(result),
        "wire_nbytes": sum(result["wire_nbytes"]) / result["updates"]["count"] * workers,
        "staleness": result["updates"]["mean_staleness"],
    }


def text(figures: dict[str, Any]) -> str:
    """Return the table."""
    rows = figures["wheel"] | figures["ddp"]
    plain, hook = (rows[name]["samples_per_s"] for name in (FLOAT32, FP16))
    lines = [
        (
            name,
            f"{row['samples_per_s']:.2f}",
            f"{row['samples_per_s'] / plain:.2f}",
            f"{row['samples_per_s'] / hook:.2f}",
            f"{row['predicted_samples_per_s']:.2f}" if "predicted_samples_per_s" in row else "",
            ", ".join(f"{share:.1%}" for share in row.get("idle", {}).values()),
            "" if name == ALONE else f"{row['wire_nbytes'] / 1e6:.1f}",
        )
        for name, row in rows.items()
    ]
    head = ("", "samples/s", "times DDP float32", "times its hook", "predicted", "idle", "MB")
    return table("AlexNet, 16 images a worker, 200 Mbit/s", head, lines)
