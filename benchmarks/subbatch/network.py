"""Measure bytes and samples/s of AlexNet on two one-core hosts at 1 Gbit/s."""

from pathlib import Path
from typing import Any

from hosts import TwoHosts, on_hosts
from network_rank import ALONE, BATCH_SIZE, BUCKETS_MB, ddp

from figures import shown, table
from paceline.links.processes import KEEPING_MEMORY

_RATE = "1gbit"
_PAYLOAD = 1448 / 1514  # of a full Ethernet frame: TCP payload / frame bytes


def measure(quick: bool) -> dict[str, Any]:
    """Return seconds and bytes of all variants."""
    with TwoHosts(_RATE) as hosts:
        folder = Path(__file__).parent
        return on_hosts(hosts, folder, "network_rank", quick, environment=KEEPING_MEMORY)


def text(figures: dict[str, Any]) -> str:
    """Return the tables of steps and of bytes."""
    rows, samples = figures["variants"], figures["samples"]
    best = min((ddp(mb) for mb in BUCKETS_MB), key=lambda name: _seconds(rows[name]))
    lines = [
        (
            name,
            shown(row["seconds"], 1e3, 0),
            f"{samples / _seconds(row):.2f}",
            f"{_seconds(rows[best]) / _seconds(row):.2f}",
            "" if name == ALONE else f"{row['wire_nbytes'] / 1e6:.2f}",
        )
        for name, row in rows.items()
    ]
    head = ("", "ms a step", "samples/s", "times the best DDP", "MB each way")
    title = f"AlexNet, {BATCH_SIZE} images a worker, two hosts, 1 Gbit/s"
    return f"{table(title, head, lines)}\n\n{_bytes(rows)}"


def _bytes(rows: dict[str, Any]) -> str:
    lines = []
    for name, row in rows.items():
        if "sent" not in row:
            continue
        sent, planned = row["sent"], row["planned"]
        whole = {"all": sum(sent.values())}, {"all": sum(planned.values())}
        for purpose, nbytes in (sent | whole[0]).items():
            expected = (planned | whole[1])[purpose]
            lines.append((name, purpose, _mb(nbytes), _mb(expected), _more(nbytes, expected)))
        expected = whole[1]["all"]
        counted = {"by the interface": 1.0, "by the interface, payload of its frames": _PAYLOAD}
        for by, part in counted.items():
            wire = part * row["wire_nbytes"]
            lines.append((name, by, _mb(wire), _mb(expected), _more(wire, expected)))
    head = ("", "purpose", "MB a step", "by the plan", "more")
    return table("Bytes that a worker sends", head, lines)


def _seconds(row: dict[str, Any]) -> float:
    seconds: float = row["seconds"]["median"]
    return seconds


def _mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:.4f}"


def _more(nbytes: float, expected: float) -> str:
    return f"{nbytes / expected - 1:+.2%}" if expected else ""
