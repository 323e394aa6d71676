"""Rehearse heads on one device and on two hosts, where p k / t > 1 (section 3.4.1).

Four K40c on two hosts at 1 Gbit/s train AlexNet, 256 images per worker, cut before its third
convolution: the head takes longer than the body. One device: its heads serve three bodies. Two
hosts: each has a child hub and a body; the first host also has the root, which only updates. For
comparison: one device with the usual cut, before the fully-connected layers.
"""

from typing import Any

from hosts import TwoHosts
from hub_and_bodies import LANES, carried_out

from figures import table

_RATE, _SAMPLES, _DEVICE, _GATHER = "1gbit", 256, "k40-gigabit/gpu0", 16
_HEAVY, _USUAL = "features.8", "classifier.1"
_QUICK = {_HEAVY: "conv2", _USUAL: "fc3"}  # cuts of lenet5
_CASES = {  # the cut, the host of each body, and whether bodies have child hubs
    f"heads on one device, cut before {_HEAVY}": (_HEAVY, (1, 0, 1), False),
    f"on two hosts, before {_HEAVY}": (_HEAVY, (0, 1), True),
    f"on one device, before {_USUAL}": (_USUAL, (1, 0, 1), False),
}


def measure(quick: bool) -> dict[str, Any]:
    """Return predicted and rehearsed samples/s."""
    with TwoHosts(_RATE) as hosts:
        return {name: _rehearsed(hosts, quick, *case) for name, case in _CASES.items()}


def _rehearsed(
    hosts: TwoHosts, quick: bool, head: str, bodies: tuple[int, ...], has_children: bool
) -> dict[str, Any]:
    model, head, steps = ("lenet5", _QUICK[head], 8) if quick else ("alexnet", head, 48)
    samples = LANES * len(bodies) * _SAMPLES
    words = ["rehearse", model, "--device", _DEVICE, "--steps", steps, "--batch-size", samples]
    words += ["--strategy", "wheel", "--strategy-option", f"head={head}"]
    gather = (4 if quick else _GATHER) if has_children else None
    result = carried_out(hosts, words, bodies, gather)
    return {
        "predicted": samples / result["predicted_step_s"],
        "rehearsed": samples / result["step_s"],
        "quartile1": samples / result["upper_quartile_s"],
        "quartile3": samples / result["lower_quartile_s"],
    }


def text(figures: dict[str, Any]) -> str:
    """Return the table."""
    first = next(iter(figures.values()))["rehearsed"]
    lines = [
        (
            name,
            f"{row['predicted']:.0f}",
            f"{row['rehearsed']:.0f} [{row['quartile1']:.0f}, {row['quartile3']:.0f}]",
            f"{row['predicted'] / row['rehearsed'] - 1:+.1%}",
            f"{row['rehearsed'] / first:.2f}",
        )
        for name, row in figures.items()
    ]
    head = ("", "predicted", "rehearsed", "error", "times the first")
    return table("Samples a second of four devices", head, lines)
