"""Run strategy wheel on two hosts: the hub on the first, body processes on either."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hosts import TwoHosts, on_hosts
from wire import ADDRESSES

from paceline.links.memory import KEEPING_MEMORY
from paceline.rpc.keys import generate_keys

HERE = Path(__file__).parent
LANES = 2  # workers that take turns on a device
_HUB = f"tcp://{ADDRESSES[0]}:5555"
_PACELINE = (sys.executable, "-m", "paceline")


def carried_out(
    hosts: TwoHosts, words: Sequence[object], bodies: Sequence[int], gather: int | None = None
) -> dict[str, Any]:
    """Run `paceline WORDS` as a hub with body processes; return its result.

    Every host has one core. `bodies`: the host of each body, which has `LANES` workers. `gather`:
    each body has a child hub on its host, which sends mean gradients of `gather` steps to the hub.
    Exits the program if a worker was lost.
    """
    with TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        generate_keys(keys)
        sizes = ["--workers", str(LANES * len(bodies)), "--strategy-option", f"lanes={LANES}"]
        if gather:
            for option in (f"child_hubs={len(bodies)}", f"gather={gather}"):
                sizes += ["--strategy-option", option]
        place = ("--listen", _HUB, "--keys", str(keys), "--output", folder, "--json")
        roles: list[list[list[str]]] = [[[*_PACELINE, *map(str, words), *sizes, *place]], []]
        for number, host in enumerate(bodies):
            hub, first = _HUB, number * LANES
            options = ("--keys", str(keys), "--timeout", "120")
            if gather:
                parent = f"{_HUB}?worker={number}&keys={keys}"  # has the other settings
                hub, first = f"tcp://{ADDRESSES[host]}:5556", 0
                roles[host].append(
                    [*_PACELINE, "hub", "--parent", parent, "--listen", hub, *options]
                )
            own = ",".join(str(first + lane) for lane in range(LANES))
            joining = ("--connect", hub, "--worker-ids", own, "--device", "cpu", "--threads", "1")
            roles[host].append([*_PACELINE, "worker", *joining, *options])
        _run(hosts, roles)
        (written,) = Path(folder).glob("*/result.json")  # child hubs print to the same stdout
        result = json.loads(written.read_text())
    if result["lost"]:
        sys.exit("\n".join(result["lost"]))
    return result


def _run(hosts: TwoHosts, roles: list[list[list[str]]]) -> None:
    """Run each host's commands as its ranks."""
    per_host = max(map(len, roles))
    commands = [words for role in roles for words in [*role, *[[]] * (per_host - len(role))]]
    program = [sys.executable, str(HERE / "role.py"), json.dumps(commands)]
    hosts.checked(program, per_host, KEEPING_MEMORY, cores=(0, 1), cwd=HERE)


def idle(result: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return each device's measured and predicted idle share of time."""
    known = {"idle": "utilisation", "predicted_idle": "predicted_utilisation"}
    return {
        name: {device: 1 - busy for device, busy in result[own].items()}
        for name, own in known.items()
    }


def on_ranks(
    hosts: TwoHosts, case: dict[str, Any], quick: bool, *, per_host: int = 1
) -> dict[str, Any]:
    """Run `case` of ddp.py on both hosts; return rank 0's times and bytes."""
    words = (json.dumps(case),)
    return on_hosts(hosts, HERE, "ddp", quick, words, per_host=per_host, environment=KEEPING_MEMORY)
