"""Rehearse the machines of Du et al. 2017, figure 8: AlexNet on K40c, 256 images per worker.

Two hosts at 1 Gbit/s have one core each; layers are paced, everything else is real. With four
devices, the first host has two: the hub, and a body that the hub reaches without the network
(section 4.1). The paper's own time to hand over between workers is left out.
"""

from typing import Any

from ddp import ALONE, FP16
from hosts import TwoHosts
from hub_and_bodies import LANES, carried_out, idle, on_ranks

from command import paceline
from figures import table

_RATE, _SAMPLES, _IMAGES, _DEVICE = "1gbit", 256, 5120, "k40-gigabit/gpu0"
_NUM_DEVICES = 4
_ALONE = "one device, nothing cut"
_BARS = {"wheel, two devices": (1,), "wheel, four devices": (1, 0, 1)}  # the host of each body


def measure(quick: bool) -> dict[str, Any]:
    """Return seconds for 5,120 images: predicted by the run, and rehearsed."""
    steps = 3 if quick else 20
    words = ("rehearse", "alexnet", "--device", _DEVICE, "--steps", steps)
    alone = paceline(*words, "--workers", 1, "--batch-size", _SAMPLES)
    bars = {_ALONE: _seconds(alone, 1)}
    with TwoHosts(_RATE) as hosts:
        for name, bodies in _BARS.items():
            workers = LANES * len(bodies)
            sizes = ("--strategy", "wheel", "--batch-size", _SAMPLES * workers)
            result = carried_out(hosts, [*words, *sizes], bodies)
            bars[name] = {**_seconds(result, workers), **idle(result)}
        case = {"batch_size": _SAMPLES, "device": _DEVICE, "hooks": [FP16]}
        case |= {"blocks": 4, "steps": 2}
        rows = on_ranks(hosts, case, quick, per_host=_NUM_DEVICES // 2)
    for row in rows.values():
        row["images_s"] = _IMAGES / row["samples"] * row["seconds"]["median"]
    return {"bars": bars, "beside": rows}


def _seconds(result: dict[str, Any], workers: int) -> dict[str, Any]:
    """Scale the seconds of a step of all workers to 5,120 images."""
    steps = _IMAGES / _SAMPLES / workers
    return {
        "predicted_s": steps * result["predicted_step_s"],
        "rehearsed_s": steps * result["step_s"],
        "quartile1_s": steps * result["lower_quartile_s"],
        "quartile3_s": steps * result["upper_quartile_s"],
    }


def text(figures: dict[str, Any]) -> str:
    """Return the table."""
    bars = figures["bars"]
    alone_s = bars[_ALONE]["rehearsed_s"]
    lines = [
        (
            name,
            f"{bar['predicted_s']:.2f}",
            f"{bar['rehearsed_s']:.2f} [{bar['quartile1_s']:.2f}, {bar['quartile3_s']:.2f}]",
            f"{bar['predicted_s'] / bar['rehearsed_s'] - 1:+.1%}",
            f"{alone_s / bar['rehearsed_s']:.2f}",
            ", ".join(f"{share:.1%}" for share in bar.get("idle", {}).values()),
        )
        for name, bar in bars.items()
    ]
    for name, row in figures["beside"].items():
        if name != ALONE:
            times = f"{alone_s / row['images_s']:.2f}"
            lines.append((f"{name}, four devices", "", f"{row['images_s']:.2f}", "", times, ""))
    head = ("", "predicted", "rehearsed", "error", "times one", "idle")
    return table("Figure 8: seconds of 5,120 images", head, lines)
