"""Rehearse figure 8 of Du et al. 2017: AlexNet on K40c, 256 images per worker, 1 Gbit/s.

Two hosts have one core each; layers are paced, everything else is real. With four devices, the
first host has two: the hub, and a body that the hub reaches without the network (section 4.1).
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from ddp import ALONE, FLOAT32, FP16
from hosts import TwoHosts
from hub_and_bodies import carried_out, idle, on_ranks

from command import paceline
from figures import table
from papers.paper_tables import printed_values
from papers.wheel import Runs, figure_8

_RATE, _SAMPLES, _IMAGES, _DEVICE = "1gbit", 256, 5120, "k40-gigabit/gpu0"
_NUM_DEVICES = 4
_FILE = Path(__file__).parents[2] / "machines" / "k40-gigabit.toml"
_CALL = re.compile(r"^call_latency_s = .*$", re.MULTILINE)


class _Bar(NamedTuple):
    """A bar of strategy wheel: the hosts of its bodies, and its name in figure 8, if any.

    Bars of figure 8 include the paper's hand-over time; the other bars include only ours.
    """

    name: str
    printed: str | None
    workers: int
    lanes: int
    bodies: tuple[int, ...]


_ALONE = ("one device, nothing cut", "Caffe")
_BARS = (
    _Bar("partitioned over two devices", "partitioned, two GPUs", 1, 1, (1,)),
    _Bar("wheel, two devices", "Wheel, two GPUs", 2, 2, (1,)),
    _Bar("wheel, four devices", "Wheel, four GPUs", 6, 2, (1, 0, 1)),
    _Bar("wheel, two devices, our handing over", None, 2, 2, (1,)),
    _Bar("wheel, four devices, our handing over", None, 6, 2, (1, 0, 1)),
)


def measure(quick: bool) -> dict[str, Any]:
    """Return seconds for 5,120 images: printed, planned, predicted by the run, rehearsed."""
    steps = 3 if quick else 20
    printed, planned = printed_values("wheel", "figure 8"), figure_8(Runs.calibrated())

    def known(bar: str | None) -> dict[str, float]:
        return {"printed_s": printed[bar,], "planned_s": planned[bar]} if bar else {}

    with _papers_k40() as device:
        sizes = ("--workers", 1, "--batch-size", _SAMPLES, "--steps", steps)
        alone = paceline("rehearse", "alexnet", "--device", device, *sizes)
        bars = {_ALONE[0]: _seconds(alone, 1) | known(_ALONE[1])}
        with TwoHosts(_RATE) as hosts:
            for bar in _BARS:
                own = _DEVICE if bar.printed is None else device
                bars[bar.name] = _wheel(hosts, bar, own, steps) | known(bar.printed)
            case = {"batch_size": _SAMPLES, "device": device, "hooks": [FP16]}
            case |= {"blocks": 4, "steps": 2}
            rows = on_ranks(hosts, case, quick, per_host=_NUM_DEVICES // 2)
    for name in (ALONE, FLOAT32, FP16):
        images = rows[name]["samples"]
        rows[name]["images_s"] = _IMAGES / images * rows[name]["seconds"]["median"]
    return {"bars": bars, "beside": rows}


@contextmanager
def _papers_k40() -> Iterator[str]:
    """Yield a device of a temporary machine file, with the hand-over time of `papers.wheel`."""
    sync_s = Runs.calibrated().machine.devices[0].sync_latency_s or 0.0
    with TemporaryDirectory() as folder:
        path = Path(folder) / _FILE.name
        added = rf'\g<0>\nsync_latency_s = "{1e6 * sync_s:.6f} us"'
        path.write_text(_CALL.sub(added, _FILE.read_text()))
        yield f"{path}:gpu0"


def _wheel(hosts: TwoHosts, bar: _Bar, device: str, steps: int) -> dict[str, Any]:
    sizes = ("--batch-size", str(_SAMPLES * bar.workers), "--steps", str(steps))
    words = ("rehearse", "alexnet", "--strategy", "wheel", "--device", device, *sizes)
    result = carried_out(hosts, words, bar.bodies, workers=bar.workers, lanes=bar.lanes)
    return {**_seconds(result, bar.workers), **idle(result), "faults": len(result["faults"])}


def _seconds(result: dict[str, Any], workers: int) -> dict[str, float]:
    """Scale the seconds of a step of all workers to 5,120 images."""
    steps = _IMAGES / _SAMPLES / workers
    return {
        "predicted_s": steps * result["predicted_step_s"],
        "rehearsed_s": steps * result["step_s"],
        "quartile1_s": steps * result["lower_quartile_s"],
        "quartile3_s": steps * result["upper_quartile_s"],
    }


def text(figures: dict[str, Any]) -> str:
    """Return the tables."""
    bars, beside = figures["bars"], figures["beside"]
    alone_s = bars[_ALONE[0]]["rehearsed_s"]
    lines = [
        (
            name,
            f"{bar['printed_s']:.2f}" if "printed_s" in bar else "",
            f"{bar['planned_s']:.2f}" if "planned_s" in bar else "",
            f"{bar['predicted_s']:.2f}",
            f"{bar['rehearsed_s']:.2f} [{bar['quartile1_s']:.2f}, {bar['quartile3_s']:.2f}]",
            f"{bar['predicted_s'] / bar['rehearsed_s'] - 1:+.1%}",
            f"{bar['rehearsed_s'] / bar['printed_s'] - 1:+.1%}" if "printed_s" in bar else "",
            f"{alone_s / bar['rehearsed_s']:.2f}",
        )
        for name, bar in bars.items()
    ]

    def times(row: dict[str, Any]) -> str:
        return f"{alone_s / row['images_s']:.2f}"

    lines += [
        (f"{name}, four devices", "", "", "", f"{row['images_s']:.2f}", "", "", times(row))
        for name, row in beside.items()
        if name != ALONE
    ]
    head = ("", "printed", "planned", "predicted", "rehearsed", "error", "of printed", "times one")
    title = "Figure 8: seconds of 5,120 images"
    return f"{table(title, head, lines)}\n\n{_idle(bars)}"


def _idle(bars: dict[str, Any]) -> str:
    lines = [
        (name, device, f"{bar['predicted_idle'].get(device, 0):.1%}", f"{idle:.1%}")
        for name, bar in bars.items()
        for device, idle in bar.get("idle", {}).items()
    ]
    return table("Idle devices", ("", "device", "predicted", "rehearsed"), lines)
