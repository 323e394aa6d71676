"""What the test bed delivers, beside what it was asked for: the figures of `main.py --check`."""

import json
import os
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from host import NoTestBed, checked  # noqa: E402
from hosts import TwoHosts  # noqa: E402
from wire import bits_per_s  # noqa: E402

from figures import shown, spread, write  # noqa: E402

WIRES = (("100mbit", None), ("1gbit", None), (None, None), ("1gbit", "1ms"))
_PROBE = str(HERE / "probe.py")
_TRANSFER_S = 0.4  # of a shaped wire
_UNSHAPED_BYTES = 200_000_000
_WARM_UP = 2
_REPEATS = 9
_ROUND_TRIPS = 2000
_CONGESTION_CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")


def cores() -> tuple[int, int]:
    """Return the cores of the two hosts: the first and the last that this process may use."""
    available = sorted(os.sched_getaffinity(0))
    return available[0], available[-1]


def probed(hosts: TwoHosts, way: str, nbytes: int, repeats: int) -> list[float]:
    """Return the seconds of each repeat after the first ones, which warm up."""
    command = [sys.executable, _PROBE, way, str(nbytes), str(_WARM_UP + repeats)]
    finished = hosts.run(command, cores=cores())
    if any(host.code for host in finished):
        raise RuntimeError("".join(host.err for host in finished))
    seconds: list[float] = json.loads(finished[0].out)
    return seconds[_WARM_UP:]


def measured(rate: str | None, latency: str | None) -> dict[str, Any]:
    """Return what a wire delivers, or why this machine cannot make it."""
    nbytes = _UNSHAPED_BYTES if rate is None else round(bits_per_s(rate) / 8 * _TRANSFER_S)
    try:
        with TwoHosts(rate, latency) as hosts:
            one_way = probed(hosts, "one", nbytes, _REPEATS)
            sent = hosts.nbytes()[0].sent
            both_ways = probed(hosts, "both", nbytes, _REPEATS)
            round_trips = probed(hosts, "one", 1, _ROUND_TRIPS)
    except NoTestBed as problem:
        return {"rate": rate, "latency": latency, "problem": str(problem)}
    return {
        "rate": rate,
        "latency": latency,
        "transfer_bytes": nbytes,
        "one_way_bits_per_s": spread([8 * nbytes / taken for taken in one_way]),
        "both_ways_bits_per_s": spread([8 * nbytes / taken for taken in both_ways]),
        "round_trip_s": spread(round_trips),
        "frame_bytes_per_byte": sent / ((_WARM_UP + _REPEATS) * nbytes),
    }


def row(wire: dict[str, Any]) -> str:
    """Return the row of a wire in the README's table."""
    name = f"| {wire['rate'] or 'unshaped'} | {wire['latency'] or 'none'} |"
    if "problem" in wire:
        return f"{name} not on this machine | | | |"
    one_way = shown(wire["one_way_bits_per_s"], 1e-6, 1)
    both_ways = shown(wire["both_ways_bits_per_s"], 1e-6, 1)
    round_trip = shown(wire["round_trip_s"], 1e6, 0)
    return f"{name} {one_way} | {both_ways} | {round_trip} | {wire['frame_bytes_per_byte']:.4f} |"


def check() -> None:
    """Measure every wire, print the table, and write result.json."""
    print("| rate | latency | TCP one way, Mbit/s | both ways at once, each, Mbit/s |", end="")
    print(" round trip, µs | frame bytes per byte sent |")
    print("|---|---|---|---|---|---|")
    wires = []
    for rate, latency in WIRES:
        wires.append(measured(rate, latency))
        print(row(wires[-1]), flush=True)
    software = {
        "iproute2": checked(["ip", "-V"]).strip(),
        "congestion_control": _CONGESTION_CONTROL.read_text().strip(),
    }
    write(HERE, {**software, "wires": wires})
