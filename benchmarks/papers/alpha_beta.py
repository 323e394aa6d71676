"""Price an exchange of all gradients by latency and bandwidth alone, as a naive predictor.

A message costs alpha seconds plus beta seconds per byte on the machine file's links. Exchanges do
not overlap with computation, and kernels, CPU cores and switches take no time.
"""

from collections.abc import Sequence

from paceline.core.machine import Device, Machine, Station
from paceline.core.transfer import Ring


def ring_s(machine: Machine, devices: Sequence[Device], nbytes: float) -> float:
    """Return the seconds of a ring all-reduce of `nbytes` over the devices."""
    return Ring.at_once(machine, devices, ()).seconds(nbytes) if len(devices) > 1 else 0.0


def tree_s(machine: Machine, devices: Sequence[Device], nbytes: float) -> float:
    """Return the seconds of a binary-tree reduce to the first device and a broadcast back.

    Each level takes as long as its slowest message.
    """
    levels_s, distance = 0.0, 1
    while distance < len(devices):
        pairs = zip(devices[:: 2 * distance], devices[distance :: 2 * distance], strict=False)
        levels_s += max(message_s(machine, child, parent, nbytes) for parent, child in pairs)
        distance *= 2
    return 2 * levels_s


def host_s(machine: Machine, devices: Sequence[Device], nbytes: float) -> float:
    """Return the seconds to copy `nbytes` per device to the host, sum, and copy back.

    The host reads each device's values and writes the sum at its memory bandwidth.
    """
    if len(devices) < 2:
        return 0.0
    host = machine.host_of(devices[0])
    copy_s = message_s(machine, devices[0], host, nbytes)
    return 2 * copy_s + (len(devices) + 1) * nbytes / host.memory_bandwidth_bytes_per_s


def message_s(machine: Machine, source: Station, target: Station, nbytes: float) -> float:
    """Return the seconds of a message: its route's latencies, and its slowest link's time."""
    links = [hop.link for hop in machine.route(source, target)]
    narrowest = min(link.bandwidth_bytes_per_s for link in links)
    return sum(link.latency_s for link in links) + nbytes / narrowest
