"""Start the processes of a hub's machine: a worker for each device, or the child hubs of a tree."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from paceline.rpc.connecting import WorkerProcessSettings
from paceline.rpc.workers import WorkerPool, num_threads
from paceline.strategies.wheel.config import RunSpec, Wheel
from paceline.strategies.wheel.remote import REFUSED, SERVING, ChildSettings

_WORKER_MODULE = "paceline.strategies.wheel.worker"


def own_processes(
    spec: RunSpec, address: str, run_id: str, deadline_s: float, devices: Sequence[str]
) -> WorkerPool:
    """Start those that connect to the hub at `address`; `devices` are those of workers."""
    connecting: dict[str, Any] = {"connect": address, "run": run_id, "deadline_s": deadline_s}
    if spec.tree is not None:
        return WorkerPool(SERVING, _child_hubs(spec.tree, connecting))
    lanes = spec.config.workers_by_device
    own = [
        WorkerProcessSettings(
            **connecting, workers=tuple(workers), device=device, threads=num_threads(len(lanes))
        )
        for device, workers in zip(devices, lanes.values(), strict=True)
    ]
    return WorkerPool(_WORKER_MODULE, own)


def _child_hubs(tree: Wheel, connecting: dict[str, Any]) -> list[ChildSettings]:
    set_by_itself = {"workers", *REFUSED}
    options = {n: value for n, value in asdict(tree).items() if n not in set_by_itself}
    own: dict[str, Any] = {
        "workers": tree.workers_of_hub,
        "gather": tree.gathered,
        "options": options,
    }
    return [ChildSettings(**connecting, number=one, **own) for one in range(tree.child_hubs)]
