"""Run strategy wheel on two hosts: the hub on the first, body processes on either."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hosts import TwoHosts, on_hosts
from wire import ADDRESSES

from paceline.links.processes import KEEPING_MEMORY
from paceline.rpc.keys import generate_keys

HERE = Path(__file__).parent
LANES = 2  # workers that take turns on a device
_HUB = f"tcp://{ADDRESSES[0]}:5555"
_PACELINE = (sys.executable, "-m", "paceline")


def carried_out(hosts: TwoHosts, words: Sequence[object], bodies: Sequence[int]) -> dict[str, Any]:
    """Run `paceline WORDS` as a hub with body processes; return its result.

    Every host has one core. `bodies`: the host of each body, which has `LANES` workers. Exits the
    program if a worker was lost.
    """
    with TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        generate_keys(keys)
        sizes = ("--workers", str(LANES * len(bodies)), "--strategy-option", f"lanes={LANES}")
        place = ("--listen", _HUB, "--keys", str(keys), "--output", folder, "--json")
        roles: list[list[list[str]]] = [[[*_PACELINE, *map(str, words), *sizes, *place]], []]
        for number, host in enumerate(bodies):
            own = ",".join(str(number * LANES + lane) for lane in range(LANES))
            joining = ("--connect", _HUB, "--keys", str(keys), "--worker-ids", own)
            options = ("--device", "cpu", "--threads", "1", "--timeout", "120")
            roles[host].append([*_PACELINE, "worker", *joining, *options])
        result = json.loads(_finished(hosts, roles))
    if result["lost"]:
        sys.exit("\n".join(result["lost"]))
    return result


def _finished(hosts: TwoHosts, roles: list[list[list[str]]]) -> str:
    """Run each host's commands as its ranks; return the first host's stdout."""
    per_host = max(map(len, roles))
    commands = [words for role in roles for words in [*role, *[[]] * (per_host - len(role))]]
    program = [sys.executable, str(HERE / "role.py"), json.dumps(commands)]
    return hosts.checked(program, per_host, KEEPING_MEMORY, cores=(0, 1), cwd=HERE)


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
