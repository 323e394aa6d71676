"""Measure the throughput and round trips of the test bed's wires at several rates."""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from host import checked
from hosts import TwoHosts
from wire import bits_per_s

from figures import Part, shown, spread, table

WIRES = (("100mbit", None), ("1gbit", None), (None, None), ("1gbit", "5ms"))
_PROBE = str(Path(__file__).with_name("probe.py"))
_TRANSFER_S = 0.4  # duration of one transfer on a shaped wire
_UNSHAPED_BYTES = 200_000_000
_WARM_UP, _REPEATS, _ROUND_TRIPS = 2, 9, 2000
_CONGESTION_CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")


def measure(quick: bool) -> dict[str, Any]:
    """Measure each wire; return the figures, and the settings of the machine's network software."""
    return {
        "iproute2": checked(["ip", "-V"]).strip(),
        "congestion_control": _CONGESTION_CONTROL.read_text().strip(),
        "wires": [_measured(*wire, 3 if quick else _REPEATS) for wire in WIRES],
    }


def _measured(rate: str | None, latency: str | None, repeats: int) -> dict[str, Any]:
    nbytes = _UNSHAPED_BYTES if rate is None else round(bits_per_s(rate) / 8 * _TRANSFER_S)
    with TwoHosts(rate, latency) as hosts:
        one_way = _probed(hosts, "one", nbytes, repeats)
        sent = hosts.nbytes()[0].sent
        both_ways = _probed(hosts, "both", nbytes, repeats)
        round_trips = _probed(hosts, "one", 1, _ROUND_TRIPS // (1 if latency is None else 10))
    return {
        "rate": rate,
        "latency": latency,
        "transfer_bytes": nbytes,
        "one_way_bits_per_s": spread([8 * nbytes / taken for taken in one_way]),
        "both_ways_bits_per_s": spread([8 * nbytes / taken for taken in both_ways]),
        "round_trip_s": spread(round_trips),
        "frame_bytes_per_byte": sent / ((_WARM_UP + repeats) * nbytes),
    }


def _probed(hosts: TwoHosts, way: str, nbytes: int, repeats: int) -> list[float]:
    """Return the seconds of each repeat, without the warm-up."""
    command = [sys.executable, _PROBE, way, str(nbytes), str(_WARM_UP + repeats)]
    available = sorted(os.sched_getaffinity(0))
    found = hosts.checked(command, cores=(available[0], available[-1]))
    seconds: list[float] = json.loads(found)
    return seconds[_WARM_UP:]


def text(figures: Mapping[str, Any]) -> str:
    """Format the table of the wires."""
    rows = []
    for wire in figures["wires"]:
        name = (wire["rate"] or "unshaped", wire["latency"] or "none")
        ways = (shown(wire[f"{way}_bits_per_s"], 1e-6, 1) for way in ("one_way", "both_ways"))
        frames = f"{wire['frame_bytes_per_byte']:.4f}"
        rows.append((*name, *ways, shown(wire["round_trip_s"], 1e6, 0), frames))
    head = ("rate", "latency", "TCP one way, Mbit/s", "both ways at once, each, Mbit/s")
    return table("", (*head, "round trip, µs", "frame bytes per byte sent"), rows)


PARTS = {"wires": Part(measure, text)}
