"""`paceline probe`: what the GPUs, the memory, the links and the codecs reach."""

from typing import Any

from evidence.commands import paceline
from part import Part, PartFailedError

from paceline.core.machine import DeviceKind

_SECONDS, _SMOKE_SECONDS = "10", "0.5"


def run(part: Part) -> None:
    """Probe all GPUs."""
    seconds = _SMOKE_SECONDS if part.smoke else _SECONDS
    machine = paceline("probe", "--seconds", seconds, "--output", "machine.toml")["machine"]
    part.keep("machine", machine, _line(machine))
    kinds = [one["kind"] for one in machine["devices"]]
    if kinds != [DeviceKind.GPU] * len(part.gpus):
        raise PartFailedError(f"{len(part.gpus)} GPUs were to be probed, not {kinds}")


def _line(machine: dict[str, Any]) -> str:
    devices = [
        f"{one['name']} {one['flops_per_s'] / 1e12:.3g} TFLOP/s, "
        f"{one['memory_bandwidth_bytes_per_s'] / 1e9:.3g} GB/s"
        for one in machine["devices"]
    ]
    links = [
        f"{'--'.join(one['between'])} {one['bandwidth_bytes_per_s'] / 1e9:.3g} GB/s"
        for one in machine["links"]
    ]
    return "; ".join([*devices, *links])
