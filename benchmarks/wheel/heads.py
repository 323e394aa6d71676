"""Rehearse heads on one device and on two hosts, where p k / t > 1 (section 3.4.1).

Four K40c on two hosts at 1 Gbit/s train AlexNet, 256 images per worker, cut before its third
convolution: the head takes longer than the body. One device: its heads serve three bodies. Two
hosts: each has a child hub and a body; the first host also has the root, which only updates. For
comparison: one device with the usual cut, before the fully-connected layers.
"""

from typing import Any

from hosts import TwoHosts
from hub_and_bodies import carried_out, tree_carried_out

from figures import table

_RATE, _SAMPLES, _LANES, _MACHINE = "1gbit", 256, 2, "k40-gigabit"
_HEAVY, _USUAL = "features.8", "classifier.1"
_QUICK = {_HEAVY: "conv2", _USUAL: "fc3"}  # cuts of lenet5
_BODIES = (1, 0, 1)  # host of each body, if one device has all heads
_GATHER = 16
_ON_ONE, _ON_TWO = f"heads on one device, cut before {_HEAVY}", f"on two hosts, before {_HEAVY}"
_BEST_ON_ONE = f"on one device, before {_USUAL}"


def measure(quick: bool) -> dict[str, Any]:
    """Return predicted and rehearsed samples/s."""
    with TwoHosts(_RATE) as hosts:
        return {
            _ON_ONE: _on_one(hosts, _HEAVY, quick),
            _ON_TWO: _on_two(hosts, quick),
            _BEST_ON_ONE: _on_one(hosts, _USUAL, quick),
        }


def _words(head: str, workers: int, quick: bool) -> tuple[str, ...]:
    model, head, steps = ("lenet5", _QUICK[head], 8) if quick else ("alexnet", head, 48)
    sizes = ("--batch-size", str(workers * _SAMPLES), "--steps", str(steps))
    device = ("--device", f"{_MACHINE}/gpu0", "--strategy-option", f"head={head}")
    return "rehearse", model, "--strategy", "wheel", *device, *sizes


def _on_one(hosts: TwoHosts, head: str, quick: bool) -> dict[str, Any]:
    workers = _LANES * len(_BODIES)
    words = _words(head, workers, quick)
    return _figures(carried_out(hosts, words, _BODIES, workers=workers, lanes=_LANES), workers)


def _on_two(hosts: TwoHosts, quick: bool) -> dict[str, Any]:
    workers, gather = 2 * _LANES, 4 if quick else _GATHER
    words = _words(_HEAVY, workers, quick)
    return _figures(tree_carried_out(hosts, words, lanes=_LANES, gather=gather), workers)


def _figures(result: dict[str, Any], workers: int) -> dict[str, Any]:
    samples = workers * _SAMPLES
    return {
        "predicted": samples / result["predicted_step_s"],
        "rehearsed": samples / result["step_s"],
        "quartile1": samples / result["upper_quartile_s"],
        "quartile3": samples / result["lower_quartile_s"],
    }


def text(figures: dict[str, Any]) -> str:
    """Return the table."""
    one = figures[_ON_ONE]["rehearsed"]
    lines = [
        (
            name,
            f"{row['predicted']:.0f}",
            f"{row['rehearsed']:.0f} [{row['quartile1']:.0f}, {row['quartile3']:.0f}]",
            f"{row['predicted'] / row['rehearsed'] - 1:+.1%}",
            f"{row['rehearsed'] / one:.2f}",
        )
        for name, row in figures.items()
    ]
    head = ("", "predicted", "rehearsed", "error", "times the first")
    return table("Samples a second of four devices", head, lines)
