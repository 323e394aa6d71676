"""Count the bytes per update of AlexNet by purpose, at the interface, and by Table 1's formula.

Each worker has 256 images. An interface also counts the headers of TCP, IP and Ethernet. The bytes
per update are the difference of two runs without profile that trace the same number of steps.
"""

from typing import Any

from ddp import FLOAT32
from hosts import TwoHosts
from hub_and_bodies import LANES, carried_out, on_ranks

from figures import table

_SAMPLES, _DEVICE = 256, "k40-gigabit/gpu0"
_PACE = ("--forward-ms", "20", "--backward-ms", "40", "--update-ms", "1")
_PAYLOAD = 1448 / 1514  # bytes of a full frame: TCP's payload, whole frame
_FEWEST, _MORE = 44, 20  # steps; runs of 42 or more trace the same number


def measure(quick: bool) -> dict[str, Any]:
    """Return the bytes per update, measured and by the formula."""
    fewest, more = (6, 4) if quick else (_FEWEST, _MORE)
    with TwoHosts(None) as hosts:
        few, few_nbytes = _wheel(hosts, fewest)
        many, many_nbytes = _wheel(hosts, fewest + more)
        case = {"batch_size": _SAMPLES, "device": _DEVICE, "hooks": [], "blocks": 3, "steps": 2}
        ddp = on_ranks(hosts, case, quick)[FLOAT32]["wire_nbytes"]
    count = many["updates"]["count"]
    updates = count - few["updates"]["count"]
    purposes = {
        row["purpose"]: {
            "nbytes": row["nbytes"] / count,
            "formula_nbytes": row["planned_nbytes"] / count,
            "travels": row["travels"],
        }
        for row in many["traffic"]
    }
    return {
        "head": many["config"]["head"],
        "purposes": purposes,
        "with_headers_nbytes": (sum(many["wire_nbytes"]) - sum(few["wire_nbytes"])) / updates,
        "interface_nbytes": (many_nbytes - few_nbytes) / updates,
        "data_parallel_nbytes": ddp,
    }


def _wheel(hosts: TwoHosts, steps: int) -> tuple[dict[str, Any], int]:
    """Return a run's result, and the bytes at host 0's interface."""
    words = ("rehearse", "alexnet", "--strategy", "wheel", "--device", _DEVICE, *_PACE)
    sizes = ("--batch-size", LANES * _SAMPLES, "--steps", steps, "--profile-s", "0")
    before = hosts.nbytes()[0]
    result = carried_out(hosts, [*words, *sizes], (1,))
    counted = hosts.nbytes()[0] - before
    return result, counted.sent + counted.received


def text(figures: dict[str, Any]) -> str:
    """Return the table, and the bytes of data parallelism."""
    purposes, counted = figures["purposes"], figures["interface_nbytes"]
    travels = [row for row in purposes.values() if row["travels"]]
    formula = sum(row["formula_nbytes"] for row in travels)
    lines = [
        (
            name,
            "on the wire" if row["travels"] else "within the hub",
            *(_mb(row["nbytes"]), _mb(row["formula_nbytes"]), ""),
        )
        for name, row in purposes.items()
    ]
    whole = {
        "all that travels": sum(row["nbytes"] for row in travels),
        "with headers": figures["with_headers_nbytes"],
        "by the interface": counted,
        "by the interface, payload of its frames": _PAYLOAD * counted,
    }
    lines += [
        (name, "on the wire", _mb(nbytes), _mb(formula), f"{nbytes / formula - 1:+.2%}")
        for name, nbytes in whole.items()
    ]
    head = ("purpose", "where", "MB an update", "by the formula", "more")
    title = f"AlexNet, {_SAMPLES} images a worker; the head begins with {figures['head']}"
    ddp = figures["data_parallel_nbytes"]
    said = (
        f"Data parallelism (DDP float32, a rank on each host): {_mb(ddp)} MB a step by the "
        f"interface, {ddp / counted:.1f} times as many."
    )
    return f"{table(title, head, lines)}\n\n{said}"


def _mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:.3f}"
