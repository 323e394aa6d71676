"""Run strategy wheel on two hosts: the hub on the first, body processes on either."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from shutil import copyfile
from tempfile import TemporaryDirectory
from typing import Any

from hosts import TwoHosts, on_hosts
from wire import ADDRESSES

from paceline.links.processes import KEEPING_MEMORY
from paceline.rpc.keys import generate_keys

HERE = Path(__file__).parent
_HUB = f"tcp://{ADDRESSES[0]}:5555"
_CHILDREN = tuple(f"tcp://{address}:5556" for address in ADDRESSES)  # a child hub on each host
_PACELINE = (sys.executable, "-m", "paceline")


def carried_out(
    hosts: TwoHosts,
    words: Sequence[str],
    bodies: Sequence[int],
    *,
    workers: int,
    lanes: int,
    trace: Path | None = None,
) -> dict[str, Any]:
    """Run `paceline WORDS` as a hub with body processes; return its result.

    Every host has one core. `bodies`: the host of each body. Each body gets the next `lanes` of the
    `workers` worker ids. `trace`: path for a copy of the run's trace.
    """
    with TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        generate_keys(keys)
        sizes = ("--workers", str(workers), "--strategy-option", f"lanes={lanes}")
        place = ("--listen", _HUB, "--keys", str(keys), "--output", folder, "--json")
        roles: list[list[list[str]]] = [[[*_PACELINE, *words, *sizes, *place]], []]
        for number, host in enumerate(bodies):
            own = range(number * lanes, min((number + 1) * lanes, workers))
            roles[host].append(_body(_HUB, keys, own))
        found = _finished(hosts, roles)
        if trace is not None:
            (written,) = Path(folder).glob("*/trace.json")
            copyfile(written, trace)
        return _whole(json.loads(found))


def tree_carried_out(
    hosts: TwoHosts, words: Sequence[str], *, lanes: int, gather: int
) -> dict[str, Any]:
    """Run `paceline WORDS` as a root hub with child hubs on both hosts; return its result.

    Each child hub serves one body with `lanes` workers on the same host. It sends mean gradients of
    `gather` steps to the root, which is on the first host.
    """
    with TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        generate_keys(keys)
        number = len(_CHILDREN)
        sizes = ("--workers", str(number * lanes), "--strategy-option", f"child_hubs={number}")
        means = ("--strategy-option", f"lanes={lanes}", "--strategy-option", f"gather={gather}")
        place = ("--listen", _HUB, "--keys", str(keys), "--output", folder, "--json")
        roles = [[[*_PACELINE, *words, *sizes, *means, *place]], []]
        for child, address in enumerate(_CHILDREN):
            parent = ("--parent", f"{_HUB}?worker={child}&keys={keys}&gather={gather}")
            own = ("--workers", str(lanes), "--strategy-option", f"lanes={lanes}")
            options = ("--listen", address, "--keys", str(keys), "--timeout", "120")
            roles[child].append([*_PACELINE, "hub", *parent, *own, *options])
            roles[child].append(_body(address, keys, range(lanes)))
        _finished(hosts, roles)
        # Read the file, because a child hub prints to the same stdout as the root.
        (written,) = Path(folder).glob("*/result.json")
        return _whole(json.loads(written.read_text()))


def _body(hub: str, keys: Path, workers: range) -> list[str]:
    joining = ("--connect", hub, "--keys", str(keys), "--worker-ids", ",".join(map(str, workers)))
    options = ("--device", "cpu", "--threads", "1", "--timeout", "120")
    return [*_PACELINE, "worker", *joining, *options]


def _whole(result: dict[str, Any]) -> dict[str, Any]:
    """Return the result; exit the program if a worker was lost."""
    if result["lost"]:
        sys.exit("\n".join(result["lost"]))
    return result


def _finished(hosts: TwoHosts, roles: list[list[list[str]]]) -> str:
    """Run each host's commands as its ranks; return the first host's stdout."""
    per_host = max(map(len, roles))
    commands = [words for role in roles for words in [*role, *[[]] * (per_host - len(role))]]
    program = [sys.executable, str(HERE / "role.py"), json.dumps(commands)]
    return hosts.checked(program, per_host, KEEPING_MEMORY, cores=(0, 1), cwd=HERE / "trained")


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
