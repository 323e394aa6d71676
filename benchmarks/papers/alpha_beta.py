"""Price an exchange of all gradients by latency and bandwidth alone, as a predictor to beat.

Nothing of it overlaps with computation, and no kernel, core or switch takes time: alpha seconds a
message and beta seconds a byte, on the links of the machine's file.
"""

from collections.abc import Sequence

from paceline.core.machine import Device, Machine, Station
from paceline.core.transfer import Ring


def ring_s(machine: Machine, devices: Sequence[Device], nbytes: float) -> float:
    """Return the seconds of a ring all-reduce of `nbytes` over devices, in their order."""
    return Ring.at_once(machine, devices, ()).seconds(nbytes) if len(devices) > 1 else 0.0


def tree_s(machine: Machine, devices: Sequence[Device], nbytes: float) -> float:
    """Return the seconds of `nbytes` up a binary tree to the first device, and down again.

    Each level takes as long as its slowest message.
    """
    levels_s, distance = 0.0, 1
    while distance < len(devices):
        pairs = zip(devices[:: 2 * distance], devices[distance :: 2 * distance], strict=False)
        levels_s += max(message_s(machine, child, parent, nbytes) for parent, child in pairs)
        distance *= 2
    return 2 * levels_s


def host_s(machine: Machine, devices: Sequence[Device], nbytes: float) -> float:
    """Return the seconds of `nbytes` of each device to its host, their sum there, and back.

    The host reads those of each device and writes the sum at its memory's bandwidth.
    """
    if len(devices) < 2:
        return 0.0
    host = machine.host_of(devices[0])
    copy_s = message_s(machine, devices[0], host, nbytes)
    return 2 * copy_s + (len(devices) + 1) * nbytes / host.memory_bandwidth_bytes_per_s


def message_s(machine: Machine, source: Station, target: Station, nbytes: float) -> float:
    """Return the seconds of one message: all latencies of its route, and its narrowest link."""
    links = [hop.link for hop in machine.route(source, target)]
    narrowest = min(link.bandwidth_bytes_per_s for link in links)
    return sum(link.latency_s for link in links) + nbytes / narrowest
